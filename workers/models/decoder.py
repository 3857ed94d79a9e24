"""Pre-norm decoder with rotary GQA attention and a gated MLP: Llama (Touvron et al., 2023) and
the families that differ from it in what ModelConfig says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from workers.layers.rotary import Rotary
from workers.models.base import Batch, LoadProgress
from workers.models.compiled import layers_of
from workers.models.layer import DecoderLayer, LayerKind, Layers, LayerStep, Norms
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


class Decoder:
    """The whole model, or one rank's part of it. Build it with `load`."""

    def __init__(
        self,
        embedding: VocabEmbedding,
        layers: Layers,
        final_norm: RMSNorm,
        head: VocabHead,
        rotaries: Mapping[RopeScaling, Rotary],
        weight_bytes: int,
    ) -> None:
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
        angles = {rope: r.angles(batch.positions, dtype) for rope, r in self._rotaries.items()}
        step = LayerStep(angles, attention, batch.logits_index)
        hidden, update = self._layers(hidden, step, caches)
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
        VocabEmbedding(rows, span, scale, collectives),
        layers_of(layers, collectives),
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
