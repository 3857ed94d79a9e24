"""Llama: pre-norm decoder with rotary GQA attention and SwiGLU (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch.nn import functional

from cluster.core.errors import ModelError
from workers.attention.backend import AttentionBackend, LayerCache
from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.modelconfig import ModelConfig
from workers.layers.linear import Linear, PackedLinear, make_linear
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Rotary, RotaryAngles
from workers.models.base import Batch, LoadProgress

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


class _Step(NamedTuple):
    """What all layers of a step share."""

    angles: RotaryAngles
    attention: AttentionBackend
    attended: torch.Tensor  # [T, heads, head_dim], scratch


class LlamaLayer:
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


class Llama:
    """The whole decoder. Build it with `load`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[LlamaLayer],
        final_norm: RMSNorm,
        head: Linear,
        weight_bytes: int,
    ) -> None:
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = Rotary(config.rope, config.head_dim, embedding.device)
        self.weight_bytes = weight_bytes

    def forward(
        self, batch: Batch, attention: AttentionBackend, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """See Model.forward."""
        config = self._config
        hidden = functional.embedding(batch.token_ids, self._embedding)
        step = _Step(
            self._rotary.angles(batch.positions, attention.angle_dtype()),
            attention,
            hidden.new_empty(len(hidden), config.num_heads, config.head_dim),
        )
        update = None
        for layer, cache in zip(self._layers, caches, strict=True):
            update = layer(hidden, update, step, cache)
        if not len(batch.logits_index):
            return hidden.new_empty(0, config.vocab_size)
        sampled = hidden.index_select(0, batch.logits_index)
        if update is None:
            raise RuntimeError("a model without layers")
        update = update.index_select(0, batch.logits_index)
        return self._head(self._final_norm.after_adding(update, sampled, attention.ops))


def expected_tensors(config: ModelConfig, found: Set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor; a tied checkpoint may or may not hold a head as well."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield _EMBEDDING, (config.vocab_size, hidden)
    yield _FINAL_NORM, (hidden,)
    if not config.tie_word_embeddings or _HEAD in found:
        yield _HEAD, (config.vocab_size, hidden)
    attention = {
        "q_proj": (config.q_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for block, shapes, biased in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", mlp, config.mlp_bias),
        ):
            for name, shape in shapes.items():
                yield f"{prefix}{block}.{name}.weight", shape
                if biased:
                    yield f"{prefix}{block}.{name}.bias", shape[:1]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: LoadProgress
) -> Llama:
    """Read every weight, fuse what is multiplied together, convert and lay out.

    Raises ModelError when a tied checkpoint carries a head that differs from the embedding.
    """
    config = checkpoint.config
    reader = _WeightReader(checkpoint, dtype, device)
    embedding = reader.read(_EMBEDDING)
    layers = []
    for number in range(config.num_layers):
        layers.append(_load_layer(reader, config, f"model.layers.{number}."))
        progress((number + 1) / (config.num_layers + 1))
    final_norm = RMSNorm(reader.read(_FINAL_NORM), config.rms_norm_eps)
    if config.tie_word_embeddings:
        _check_tied_head(checkpoint)
        head = reader.share(embedding)
    else:
        head = reader.linear([_HEAD], biased=False)
    progress(1.0)
    return Llama(config, embedding, layers, final_norm, head, reader.bytes)


def _load_layer(reader: _WeightReader, config: ModelConfig, prefix: str) -> LlamaLayer:
    def fused(block: str, *names: str) -> Linear:
        biased = config.mlp_bias if block == "mlp" else config.attention_bias
        return reader.linear([f"{prefix}{block}.{name}.weight" for name in names], biased)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(reader.read(f"{prefix}{name}.weight"), config.rms_norm_eps)

    return LlamaLayer(
        config,
        norms=(norm("input_layernorm"), norm("post_attention_layernorm")),
        qkv=fused("self_attn", "q_proj", "k_proj", "v_proj"),
        attention_out=fused("self_attn", "o_proj"),
        mlp=GatedMLP(fused("mlp", "gate_proj", "up_proj"), fused("mlp", "down_proj")),
    )


def _check_tied_head(checkpoint: Checkpoint) -> None:
    if _HEAD not in checkpoint.tensor_names:
        return
    if not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING)):
        raise ModelError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {_HEAD!r} differs from "
            f"{_EMBEDDING!r}: which of the two is meant cannot be known"
        )


class _WeightReader:
    """Reads tensors into their final dtype and place, and counts the bytes that stay."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self.bytes = 0

    def read(self, name: str) -> torch.Tensor:
        return self._place([self._checkpoint.tensor(name)])

    def linear(self, names: list[str], biased: bool) -> Linear:
        """One product out of the weights `names`, stacked along the output dimension."""
        weight = self._place([self._checkpoint.tensor(name) for name in names])
        bias = None
        if biased:
            biases = [name.removesuffix("weight") + "bias" for name in names]
            bias = self._place([self._checkpoint.tensor(name) for name in biases])
        return make_linear(weight, bias)

    def share(self, embedding: torch.Tensor) -> Linear:
        """The embedding as the head. Packed, it is a second copy in memory."""
        head = make_linear(embedding)
        if isinstance(head, PackedLinear):
            self.bytes += embedding.nbytes
        return head

    def _place(self, parts: list[torch.Tensor]) -> torch.Tensor:
        rows = sum(len(part) for part in parts)
        placed = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        begin = 0
        for part in parts:
            placed[begin : begin + len(part)].copy_(part)
            begin += len(part)
        self.bytes += placed.nbytes
        return placed
