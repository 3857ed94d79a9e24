"""Seeded random Llama folders, small enough to run hundreds of steps in a second."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a tiny checkpoint. rope: keys to merge into config.json."""

    vocab: int = 128
    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    max_len: int = 512
    tied: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32
    rope: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.biased,
            "mlp_bias": self.biased,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            **self.rope,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int, scale: float = 0.15) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.dtype)

        def norm() -> torch.Tensor:
            return (1 + 0.2 * torch.randn(self.hidden, generator=generator)).to(self.dtype)

        tensors = {"model.embed_tokens.weight": random(self.vocab, self.hidden, scale=0.5)}
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, shape in shapes.items():
                tensors[f"{prefix}{name}.weight"] = random(*shape)
                if self.biased:
                    tensors[f"{prefix}{name}.bias"] = random(shape[0])
            tensors[f"{prefix}input_layernorm.weight"] = norm()
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm()
        tensors["model.norm.weight"] = norm()
        if not self.tied:
            tensors["lm_head.weight"] = random(self.vocab, self.hidden, scale=0.5)
        return tensors


def write_model(folder: Path, spec: TinyLlama, shards: int = 1) -> Path:
    """Write `spec` as a Hugging Face folder, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, spec.config())
    tensors = spec.tensors()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
