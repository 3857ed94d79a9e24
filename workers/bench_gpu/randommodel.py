"""A Llama of any shape with random weights, as a folder: speed does not depend on what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

_POOL_ELEMENTS = 1 << 24
"""Weights repeat after so many: drawing 8 billion would take longer than all measurements."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes in elements. The defaults are those of an 8B Llama 3."""

    vocab: int = 128256
    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    max_len: int = 16384

    @property
    def parameters(self) -> int:
        return sum(
            torch.Size(shape).numel() for tensors in self.files() for shape in tensors.values()
        )

    def files(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Names and shapes of the tensors, one file after the other: a layer each, and the rest."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            shapes = {
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
                "self_attn.q_proj": (query, self.hidden),
                "self_attn.k_proj": (key, self.hidden),
                "self_attn.v_proj": (key, self.hidden),
                "self_attn.o_proj": (self.hidden, query),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
            }
            yield {f"model.layers.{layer}.{name}.weight": size for name, size in shapes.items()}
        yield {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }


def write_random_model(folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Into an existing folder, 2 bytes per parameter in bf16."""
    pool = (torch.randn(_POOL_ELEMENTS) * 0.02).to(dtype)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shape.files()):
        name = f"model-{number:05}.safetensors"
        save_file({n: _filled(pool, size) for n, size in tensors.items()}, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype)))


def _filled(pool: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=pool.dtype)
    elements = torch.Size(size).numel()
    return pool.repeat(-(-elements // len(pool)))[:elements].view(size)


def _config(shape: ModelShape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
