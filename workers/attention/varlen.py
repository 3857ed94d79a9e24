"""The FlashAttention inside torch itself, from 2.13 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from workers.attention.backend import LayerCache
from workers.attention.providers import FlashProvider, FlashStep


class TorchVarlen(FlashProvider):
    """torch.nn.attention.varlen. Whether it is causal is said by the window alone."""

    module = "torch.nn.attention.varlen"
    distribution = "torch"
    advice = "install torch 2.13 or later"
    functions: ClassVar[Mapping[str, frozenset[str]]] = {
        "varlen_attn": frozenset(
            {
                *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale"),
                *("window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"),
            }
        ),
    }
    page_multiple = 256
    softcap = False

    def attend(
        self,
        step: FlashStep,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
    ) -> None:
        meta, spec = step.meta, self.spec
        result = self._calls["varlen_attn"](
            query=query,
            key=cache.keys,
            value=cache.values,
            cu_seq_q=meta.cu_seqlens_q,
            cu_seq_k=None,
            max_q=meta.max_q,
            max_k=meta.max_k,
            scale=spec.scale,
            window_size=(window - 1, 0) if window else (-1, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=meta.seqused_k,
            block_table=meta.block_table,
            # Several parts of paged keys are wrong in FlashAttention 2's variable-length call.
            num_splits=1,
        )
        out.copy_(result)
