"""Pre-norm decoder with rotary GQA attention and a gated MLP: Llama (Touvron et al., 2023) and
the families that differ from it in what ModelConfig says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from cluster.core.errors import ModelError
from workers.attention.backend import AttentionBackend, LayerCache
from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.modelconfig import ModelConfig
from workers.checkpoint.rope import RopeScaling
from workers.layers.linear import Linear
from workers.layers.mlp import GATES, GatedMLP
from workers.layers.norm import HeadNorm, RMSNorm
from workers.layers.parallel import SummedLinear, VocabEmbedding, VocabHead, lookup
from workers.layers.rotary import Rotary, RotaryAngles
from workers.models.base import Batch, LoadProgress
from workers.models.tensors import (
    AFTER_BLOCKS,
    BEFORE_BLOCKS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_NORMS,
    PLAIN_NORMS,
    Axis,
)
from workers.models.weights import WeightReader
from workers.parallel.collectives import Collectives


class _Step(NamedTuple):
    """What all layers of a step share. angles: by rotary embedding. logits_index: [R], the tokens
    that logits are wanted of."""

    angles: Mapping[RopeScaling, RotaryAngles]
    attention: AttentionBackend
    attended: torch.Tensor  # [T, the rank's heads, head_dim], scratch
    logits_index: torch.Tensor


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
    """One decoder layer."""

    def __init__(
        self, kind: LayerKind, norms: Norms, qkv: Linear, attention_out: Linear, mlp: GatedMLP
    ) -> None:
        """qkv: hidden -> [query | key | value] heads."""
        self._kind = kind
        self._norms = norms
        self._qkv = qkv
        self._attention_out = attention_out
        self._mlp = mlp

    def __call__(
        self, hidden: torch.Tensor, update: torch.Tensor | None, step: _Step, cache: LayerCache
    ) -> torch.Tensor:
        """Change the residual stream `hidden`, [T, hidden], in place and return the update that
        the next norm is to add to it: adding and normalising are one pass. update: the last
        layer's, None in the first."""
        attended = self._attend(hidden, update, step, cache)
        return self._feed(hidden, attended.flatten(1), step)

    def last(
        self, hidden: torch.Tensor, update: torch.Tensor | None, step: _Step, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer all tokens' K and V are wanted, but only what logits are made of goes
        on: the residual stream and its update, [R, hidden] each."""
        attended = self._attend(hidden, update, step, cache)
        hidden = hidden.index_select(0, step.logits_index)
        return hidden, self._feed(
            hidden, attended.flatten(1).index_select(0, step.logits_index), step
        )

    def _feed(self, hidden: torch.Tensor, attended: torch.Tensor, step: _Step) -> torch.Tensor:
        """attended: [rows of hidden, the rank's heads * head_dim]. Returns the layer's update."""
        ops, norms = step.attention.ops, self._norms
        projected = self._attention_out(attended)
        if norms.after_attention is not None:
            projected = norms.after_attention(projected, ops)
        fed = self._mlp(norms.mlp.after_adding(projected, hidden, ops), ops)
        return fed if norms.after_mlp is None else norms.after_mlp(fed, ops)

    def _attend(
        self, hidden: torch.Tensor, update: torch.Tensor | None, step: _Step, cache: LayerCache
    ) -> torch.Tensor:
        """Add the update to the stream; [T, the rank's heads, head_dim], in the step's scratch."""
        window, rope, head_dim = self._kind
        ops, norm = step.attention.ops, self._norms.attention
        x = norm(hidden, ops) if update is None else norm.after_adding(update, hidden, ops)
        heads = self._qkv(x).view(len(x), -1, head_dim)
        if self._norms.heads is not None:
            self._norms.heads(heads, step.attention.ops)
        query = step.attention.rotate_and_write(heads, step.angles[rope], cache)
        step.attention.run(query, cache, step.attended, window)
        return step.attended


class Decoder:
    """The whole model, or one rank's part of it. Build it with `load`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: VocabEmbedding,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: VocabHead,
        rotaries: Mapping[RopeScaling, Rotary],
        weight_bytes: int,
    ) -> None:
        self._head_dim = config.head_dim
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotaries = rotaries
        self.weight_bytes = weight_bytes

    def forward(
        self, batch: Batch, attention: AttentionBackend, caches: Sequence[LayerCache]
    ) -> torch.Tensor | None:
        """See Model.forward."""
        hidden = self._embedding(batch.token_ids)
        dtype = attention.angle_dtype()
        step = _Step(
            {rope: r.angles(batch.positions, dtype) for rope, r in self._rotaries.items()},
            attention,
            hidden.new_empty(len(hidden), attention.spec.num_heads, self._head_dim),
            batch.logits_index,
        )
        *layers, last = self._layers
        update = None
        for layer, cache in zip(layers, caches, strict=False):
            update = layer(hidden, update, step, cache)
        hidden, update = last.last(hidden, update, step, caches[-1])
        return self._head(self._final_norm.after_adding(update, hidden, attention.ops))


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress,
    collectives: Collectives,
) -> Decoder:
    """Read the rank's weights, fuse what is multiplied together, convert and lay out.

    Raises ModelError when a tied checkpoint carries a head that differs from the embedding.
    """
    config = checkpoint.config
    reader = WeightReader(checkpoint, dtype, device, collectives.shard)
    embedding = reader.read(EMBEDDING)
    layers = []
    for number in range(config.num_layers):
        layers.append(_load_layer(reader, config, number, collectives))
        progress((number + 1) / (config.num_layers + 1))
    final_norm = _norm(reader, config, FINAL_NORM)
    if config.tie_word_embeddings:
        _check_tied_head(checkpoint, reader)
        head, rows = reader.share(embedding)
    else:
        head, rows = reader.linear(HEAD), lookup(embedding)
    progress(1.0)
    span = reader.spans[Axis.VOCAB]
    scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
    ropes = {_rope(config, window) for window in config.windows}
    return Decoder(
        config,
        VocabEmbedding(rows, span, scale, collectives),
        layers,
        final_norm,
        VocabHead(head, config.vocab_size, config.logits_softcap, collectives),
        {rope: Rotary(rope, config.head_dim, device) for rope in ropes},
        reader.bytes,
    )


def _rope(config: ModelConfig, window: int) -> RopeScaling:
    return config.local_rope if window else config.rope


def _load_layer(
    reader: WeightReader, config: ModelConfig, number: int, collectives: Collectives
) -> DecoderLayer:
    prefix = f"model.layers.{number}."

    def fused(*names: str) -> Linear:
        return reader.linear(*(f"{prefix}{name}_proj.weight" for name in names))

    def summed(name: str) -> Linear:
        return SummedLinear(fused(name), collectives)

    window = config.windows[number]
    return DecoderLayer(
        LayerKind(window, _rope(config, window), config.head_dim),
        _load_norms(reader, config, prefix),
        qkv=fused("self_attn.q", "self_attn.k", "self_attn.v"),
        attention_out=summed("self_attn.o"),
        mlp=GatedMLP(fused("mlp.gate", "mlp.up"), summed("mlp.down"), GATES[config.activation]),
    )


def _load_norms(reader: WeightReader, config: ModelConfig, prefix: str) -> Norms:
    def norms(names: tuple[str, ...]) -> list[RMSNorm]:
        return [_norm(reader, config, f"{prefix}{name}.weight") for name in names]

    heads = _load_head_norm(reader, config, prefix) if config.norm_heads else None
    if config.norm_outputs:
        attention, mlp = norms(BEFORE_BLOCKS)
        after_attention, after_mlp = norms(AFTER_BLOCKS)
        return Norms(attention, mlp, after_attention, after_mlp, heads)
    attention, mlp = norms(PLAIN_NORMS)
    return Norms(attention, mlp, heads=heads)


def _load_head_norm(reader: WeightReader, config: ModelConfig, prefix: str) -> HeadNorm:
    """All query heads share one weight, all key heads another; they are laid out per head."""
    per_head = []
    for name, axis in zip(HEAD_NORMS, (Axis.QUERY, Axis.KV), strict=True):
        weight = reader.norm(f"{prefix}{name}.weight", offset=config.norm_offset)
        per_head.append(weight.expand(reader.spans[axis].size // config.head_dim, -1))
    return HeadNorm(torch.cat(per_head), config.rms_norm_eps)


def _norm(reader: WeightReader, config: ModelConfig, name: str) -> RMSNorm:
    return RMSNorm(reader.norm(name, offset=config.norm_offset), config.rms_norm_eps)


def _check_tied_head(checkpoint: Checkpoint, reader: WeightReader) -> None:
    if HEAD not in checkpoint.tensor_names:
        return
    if not torch.equal(reader.saved(HEAD), reader.saved(EMBEDDING)):
        raise ModelError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {HEAD!r} differs from "
            f"{EMBEDDING!r}: which of the two is meant cannot be known"
        )
