"""A step as attention kernels see it, in buffers that live as long as the worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Views of one step; valid until the next step is staged. All tensors are int32.

    S sequences, T tokens. Sequence s owns tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1], which
    are the last of its seqused_k[s] keys (causal, aligned lower right).

    num_decodes: leading sequences with exactly one token.
    max_q, max_k: largest query count and key count.
    cu_seqlens_q: [S + 1]. seqused_k: [S], keys per sequence, this step's own included.
    block_table: [S, blocks of max_k], physical blocks; 0 beyond a sequence's own.
    slot_mapping: [T], block * block_size + offset where a token's K and V go; -1 is padding.
    positions: [T]. logits_index: [rows that sample], token index of each.
    """

    num_seqs: int
    num_tokens: int
    num_decodes: int
    max_q: int
    max_k: int
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor


class StagedBuffer:
    """An int32 buffer written on the host through numpy and read on `device`.

    On the CPU both sides are one memory; for an accelerator the host side is pinned, so that
    the copy needs no staging of its own.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=not on_host)
        self._device = self._host if on_host else self._host.to(device)
        self.array: np.ndarray = self._host.numpy()

    def publish(self, *size: int) -> torch.Tensor:
        """The leading `size` of the buffer on the device, after copying it there if need be."""
        window = tuple(slice(n) for n in size)
        view = self._device[window]
        if self._device is not self._host:
            # Blocking: the host side is rewritten for the next step.
            view.copy_(self._host[window])
        return view
