"""A pre-norm decoder layer, and a step through all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from workers.attention.backend import AttentionBackend, LayerCache
from workers.checkpoint.rope import RopeScaling
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import HeadNorm, RMSNorm
from workers.layers.rotary import RotaryAngles


class LayerStep(NamedTuple):
    """What all layers of a step share. angles: by rotary embedding. logits_index: [R] int32, the
    tokens that logits are wanted of. attention: has planned the step."""

    angles: Mapping[RopeScaling, RotaryAngles]
    attention: AttentionBackend
    logits_index: torch.Tensor


class Layers(Protocol):
    """All decoder layers of a model, or of one rank."""

    def __call__(
        self, hidden: torch.Tensor, step: LayerStep, caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [T, width], the embedded tokens; changed. Returns the residual stream of the
        tokens of logits_index and what is yet to be added to it, [R, width] each."""


class Norms(NamedTuple):
    """A layer's norms: before attention and MLP, of what they return, of query and key heads."""

    attention: RMSNorm
    mlp: RMSNorm
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None
    heads: HeadNorm | None = None


class LayerKind(NamedTuple):
    """What a layer sees, window 0 being everything, and how it rotates."""

    window: int
    rope: RopeScaling
    head_dim: int


class DecoderLayer:
    """One decoder layer. layers.cpp does the same in the same order."""

    def __init__(
        self,
        kind: LayerKind,
        norms: Norms,
        qkv: Linear,
        attention_out: Linear,
        mlp: GatedMLP,
    ) -> None:
        """qkv: hidden -> [query | key | value] heads."""
        self.kind = kind
        self.norms = norms
        self.qkv = qkv
        self.attention_out = attention_out
        self.mlp = mlp

    def attend(
        self,
        hidden: torch.Tensor,
        update: torch.Tensor | None,
        step: LayerStep,
        cache: LayerCache,
        attended: torch.Tensor,
    ) -> None:
        """Add the update, which the layer before returned, to the residual stream `hidden` in
        place, [T, width] each; attention into `attended`, [T, the rank's heads, head_dim]."""
        window, rope, head_dim = self.kind
        ops, norm = step.attention.ops, self.norms.attention
        x = norm(hidden, ops) if update is None else norm.after_adding(update, hidden, ops)
        heads = self.qkv(x).view(len(x), -1, head_dim)
        if self.norms.heads is not None:
            self.norms.heads(heads, ops)
        query = step.attention.rotate_and_write(heads, step.angles[rope], cache)
        step.attention.run(query, cache, attended, window)

    def feed(self, hidden: torch.Tensor, attended: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Change `hidden`, [rows, width], in place, and return the update that the next norm is to
        add to it: adding and normalising are one pass. attended: [rows, heads, head_dim]."""
        ops, norms = step.attention.ops, self.norms
        projected = self.attention_out(attended.flatten(1))
        if norms.after_attention is not None:
            projected = norms.after_attention(projected, ops)
        fed = self.mlp(norms.mlp.after_adding(projected, hidden, ops), ops)
        return fed if norms.after_mlp is None else norms.after_mlp(fed, ops)


class EachLayer:
    """The layers one after the other, on whatever device and kernels."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        """At least one."""
        self._layers = layers

    def __call__(
        self, hidden: torch.Tensor, step: LayerStep, caches: Sequence[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = step.attention.spec
        attended = hidden.new_empty(len(hidden), spec.num_heads, spec.head_dim)
        *layers, last = self._layers
        update = None
        for layer, cache in zip(layers, caches, strict=False):
            layer.attend(hidden, update, step, cache, attended)
            update = layer.feed(hidden, attended, step)
        # The last layer's K and V are wanted of all tokens, what follows of those with logits only.
        last.attend(hidden, update, step, caches[-1], attended)
        wanted = step.logits_index
        hidden = hidden.index_select(0, wanted)
        return hidden, last.feed(hidden, attended.index_select(0, wanted), step)
