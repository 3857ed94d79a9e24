"""Pre-norm decoder with rotary GQA attention and a gated MLP: Llama (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cluster.core.errors import ModelError
from workers.attention.backend import AttentionBackend, LayerCache
from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.modelconfig import ModelConfig
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.parallel import SummedLinear, VocabEmbedding, VocabHead
from workers.layers.rotary import Rotary, RotaryAngles
from workers.models.base import Batch, LoadProgress
from workers.models.tensors import EMBEDDING, FINAL_NORM, HEAD, Axis
from workers.models.weights import WeightReader
from workers.parallel.collectives import Collectives


class _Step(NamedTuple):
    """What all layers of a step share."""

    angles: RotaryAngles
    attention: AttentionBackend
    attended: torch.Tensor  # [T, the rank's heads, head_dim], scratch


class DecoderLayer:
    """One decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        norms: tuple[RMSNorm, RMSNorm],
        qkv: Linear,
        attention_out: Linear,
        mlp: GatedMLP,
    ) -> None:
        """norms: before attention, before the MLP. qkv: hidden -> [query | key | value] heads."""
        self._head_dim = config.head_dim
        self._attention_norm, self._mlp_norm = norms
        self._qkv = qkv
        self._attention_out = attention_out
        self._mlp = mlp

    def __call__(
        self, hidden: torch.Tensor, update: torch.Tensor | None, step: _Step, cache: LayerCache
    ) -> torch.Tensor:
        """Change the residual stream `hidden`, [T, hidden], in place and return the update that
        the next norm is to add to it: adding and normalising are one pass. update: the last
        layer's, None in the first."""
        ops = step.attention.ops
        if update is None:
            normed = self._attention_norm(hidden, ops)
        else:
            normed = self._attention_norm.after_adding(update, hidden, ops)
        attended = self._attend(normed, step, cache)
        return self._mlp(self._mlp_norm.after_adding(attended, hidden, ops), ops)

    def _attend(self, x: torch.Tensor, step: _Step, cache: LayerCache) -> torch.Tensor:
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        query = step.attention.rotate_and_write(heads, step.angles, cache)
        step.attention.run(query, cache, step.attended)
        return self._attention_out(step.attended.flatten(1))


class Decoder:
    """The whole model, or one rank's part of it. Build it with `load`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: VocabEmbedding,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: VocabHead,
        rotary: Rotary,
        weight_bytes: int,
    ) -> None:
        self._head_dim = config.head_dim
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary
        self.weight_bytes = weight_bytes

    def forward(
        self, batch: Batch, attention: AttentionBackend, caches: Sequence[LayerCache]
    ) -> torch.Tensor | None:
        """See Model.forward."""
        hidden = self._embedding(batch.token_ids)
        step = _Step(
            self._rotary.angles(batch.positions, attention.angle_dtype()),
            attention,
            hidden.new_empty(len(hidden), attention.spec.num_heads, self._head_dim),
        )
        update = None
        for layer, cache in zip(self._layers, caches, strict=True):
            update = layer(hidden, update, step, cache)
        if update is None:
            raise RuntimeError("a model without layers")
        # The norm works on rows: only those that are asked for.
        hidden = hidden.index_select(0, batch.logits_index)
        update = update.index_select(0, batch.logits_index)
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
        layers.append(_load_layer(reader, config, f"model.layers.{number}.", collectives))
        progress((number + 1) / (config.num_layers + 1))
    final_norm = RMSNorm(reader.read(FINAL_NORM), config.rms_norm_eps)
    if config.tie_word_embeddings:
        _check_tied_head(checkpoint, reader)
        head = reader.share(embedding)
    else:
        head = reader.linear(HEAD)
    progress(1.0)
    return Decoder(
        config,
        VocabEmbedding(embedding, reader.spans[Axis.VOCAB], collectives),
        layers,
        final_norm,
        VocabHead(head, config.vocab_size, collectives),
        Rotary(config.rope, config.head_dim, device),
        reader.bytes,
    )


def _load_layer(
    reader: WeightReader, config: ModelConfig, prefix: str, collectives: Collectives
) -> DecoderLayer:
    def fused(*names: str) -> Linear:
        return reader.linear(*(f"{prefix}{name}_proj.weight" for name in names))

    def summed(name: str) -> Linear:
        return SummedLinear(fused(name), collectives)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(reader.read(f"{prefix}{name}.weight"), config.rms_norm_eps)

    return DecoderLayer(
        config,
        norms=(norm("input_layernorm"), norm("post_attention_layernorm")),
        qkv=fused("self_attn.q", "self_attn.k", "self_attn.v"),
        attention_out=summed("self_attn.o"),
        mlp=GatedMLP(fused("mlp.gate", "mlp.up"), summed("mlp.down")),
    )


def _check_tied_head(checkpoint: Checkpoint, reader: WeightReader) -> None:
    if HEAD not in checkpoint.tensor_names:
        return
    if not torch.equal(reader.saved(HEAD), reader.saved(EMBEDDING)):
        raise ModelError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {HEAD!r} differs from "
            f"{EMBEDDING!r}: which of the two is meant cannot be known"
        )
