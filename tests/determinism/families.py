"""Tiny random checkpoints of every family, made and saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_theta": 50_000.0, "rope_type": "default"}
LINEAR = {"rope_theta": 80_000.0, "rope_type": "linear", "factor": 2.0}
GEMMA3 = {
    "head_dim": 32,
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LINEAR, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 17, "head_dim": 32, "rope_parameters": ROPE}),
    "mistral-tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": ROPE}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": ROPE}),
    "qwen3-bias-tied": (
        "Qwen3",
        {"head_dim": 48, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": ("Gemma3", {**GEMMA3, "tie_word_embeddings": True}),
    "gemma3-untied-capped": ("Gemma3", {**GEMMA3, "final_logit_softcapping": 5.0}),
}


def spelled(options: dict[str, Any]) -> dict[str, Any]:
    """As the transformers at hand wants it: before 5, it does not read rope_parameters."""
    if int(transformers.__version__.split(".")[0]) >= 5 or "rope_parameters" not in options:
        return options
    old = {name: value for name, value in options.items() if name != "rope_parameters"}
    rope = options["rope_parameters"]
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return old


def write_family(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of `name` whose every weight is random."""
    prefix, options = FAMILIES[name]
    config_class = getattr(
        transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    )
    config = config_class(**{**SIZES, **spelled(options)})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            random = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                # Gemma saves what is to be added to 1.
                weight.copy_(random * 0.2 + ("Gemma" not in prefix))
            elif "embed_tokens" in key:
                weight.copy_(random * (0.06 if "Gemma" in prefix else 0.5))
            else:
                weight.copy_(random * 0.15)
    model.to(dtype).save_pretrained(folder)
    return folder


def oracle(folder: Path) -> Any:
    """The model as transformers runs it in fp32. Eager: only there are scores capped."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@torch.inference_mode()
def greedy_tokens(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """By whole forward passes: no cache of transformers has a say."""
    outputs = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs
