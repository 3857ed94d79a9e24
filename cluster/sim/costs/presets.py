"""Machines and models by name. Figures are the makers' own: dense bf16, decimal units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.core.errors import ConfigError
from cluster.sim.costs.hardware import THIS_CPU, Hardware, PowerLimit

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated feed-forward, in bf16."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int
    tied_embeddings: bool = False

    @property
    def matmul_params(self) -> int:
        """Parameters that every token is multiplied with; the embedding look-up is none of them."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    @property
    def params(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab * self.hidden
        return self.matmul_params + embedding

    @property
    def weight_bytes(self) -> int:
        return BF16_BYTES * self.params

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * BF16_BYTES * self.layers * self.kv_heads * self.head_dim


HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        Hardware("a100", 312e12, 2.039e12, 80e9, 300e9, PowerLimit(400 - 100)),
        Hardware("h100", 989e12, 3.35e12, 80e9, 450e9, PowerLimit(700 - 100)),
        Hardware("h200", 989e12, 4.8e12, 141e9, 450e9, PowerLimit(700 - 100)),
        Hardware("b200", 2250e12, 8.0e12, 180e9, 900e9, PowerLimit(1000 - 100, 0.6, 50.0)),
    )
}
"""SXM parts. Power limits: board less 100 W at rest; the B200's energy per unit is an estimate."""

MODELS: Mapping[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 64, tied_embeddings=True),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 128),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 14336, 32768, 128),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 128),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 128),
        ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 128),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 128),
        ModelShape("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, 128),
        ModelShape("llama-3-405b", 126, 16384, 128, 8, 53248, 128256, 128),
    )
}


T = TypeVar("T")


def find_hardware(name: str) -> Hardware:
    """Raises ConfigError naming the ones there are."""
    if name == THIS_CPU:
        # Late: it brings numpy, which no other preset needs.
        from cluster.sim.costs.this_cpu import measure

        return measure()
    return _find(name, HARDWARE, "hardware", extra=(THIS_CPU,))


def find_model(name: str) -> ModelShape:
    """By full name, or by its size alone ("8b", "70b") where that names one Llama 3."""
    return _find(MODEL_ALIASES.get(name.lower(), name), MODELS, "model")


MODEL_ALIASES = {
    "1b": "llama-3.2-1b",
    "7b": "llama-2-7b",
    "8b": "llama-3-8b",
    "32b": "qwen2.5-32b",
    "70b": "llama-3-70b",
    "405b": "llama-3-405b",
}


def _find(name: str, known: Mapping[str, T], kind: str, extra: tuple[str, ...] = ()) -> T:
    try:
        return known[name.lower()]
    except KeyError:
        names = ", ".join((*known, *extra))
        raise ConfigError(f"unknown {kind} {name!r}; there are {names}") from None
