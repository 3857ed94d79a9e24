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

    On the CPU both sides are one memory. For an accelerator the host side is pinned, and there are
    two of it, written in turns: the copy of one step may still be under way while the next one is
    written. By the time that a half's turn comes again, its step has been waited for.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        halves = 1 if device.type == "cpu" else 2
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(halves)
        ]
        self.arrays: list[np.ndarray] = [host.numpy() for host in self._hosts]
        """The halves; they stay where they are."""
        self.turn = 0
        """Which of `arrays` is written now."""
        # Where it is stays the same for ever: graphs read it there.
        self._device = self._hosts[0] if halves == 1 else self._hosts[0].to(device)
        self._viewed: tuple[tuple[int, ...], torch.Tensor] = (shape, self._device)

    @property
    def array(self) -> np.ndarray:
        """Where the step is to be written. Holds what some earlier step left."""
        return self.arrays[self.turn]

    def take_turn(self) -> None:
        """Before a step is written."""
        self.turn = (self.turn + 1) % len(self.arrays)

    def publish(self, *size: int) -> torch.Tensor:
        """The leading `size` of the buffer on the device, after copying it there if need be. The
        copy is done when what is queued on the device after it begins."""
        view = self.view(*size)
        if len(self._hosts) > 1:
            window = tuple(slice(n) for n in size)
            view.copy_(self._hosts[self.turn][window], non_blocking=True)
        return view

    def view(self, *size: int) -> torch.Tensor:
        """The leading `size` of the buffer on the device, as it is."""
        # Decodes come in steps of one size, and making a view costs more than filling it.
        if self._viewed[0] != size:
            self._viewed = (size, self._device[tuple(slice(n) for n in size)])
        return self._viewed[1]
