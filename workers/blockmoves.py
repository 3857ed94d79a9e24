"""Moves of whole KV blocks between steps: to host memory, within the cache, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cluster.core.plan import BlockCopy, StepPlan
from workers.attention.backend import LayerCache


class _Ids(NamedTuple):
    """The ids that one side of a move may use: [low, high]. name: as in error messages."""

    name: str
    low: int
    high: int


class BlockMover:
    """Carries out a plan's swap_out, copies and swap_in, K and V of all layers.

    Moves of one kind happen at once: all of its reads come before its writes.
    """

    def __init__(self, caches: Sequence[LayerCache], host_blocks: int) -> None:
        """host_blocks: slots of host memory, each as large as a block; allocated at first use."""
        self._caches = caches
        self._host: list[LayerCache] = []
        self._slots = _Ids("host slots", 0, host_blocks - 1)
        self._blocks = _Ids("blocks", 1, len(caches[0].keys) - 1)

    def apply(self, plan: StepPlan) -> None:
        """Raises RuntimeError for ids out of range or a target that is written twice."""
        if not (plan.swap_out or plan.copies or plan.swap_in):
            return
        with torch.inference_mode():
            if plan.swap_out:
                self._check("swap_out", plan.swap_out, self._blocks, self._slots)
                self._move(plan.swap_out, self._caches, self._host_memory())
            if plan.copies:
                self._check("copies", plan.copies, self._blocks, self._blocks)
                self._move(plan.copies, self._caches, self._caches)
            if plan.swap_in:
                self._check("swap_in", plan.swap_in, self._slots, self._blocks)
                self._move(plan.swap_in, self._host_memory(), self._caches)

    def _host_memory(self) -> list[LayerCache]:
        """[slots, block_size, kv_heads, head_dim] per layer, pinned where a GPU copies from it."""
        if not self._host:
            pinned = self._caches[0].keys.device.type == "cuda"
            slots = self._slots.high + 1
            self._host = [
                LayerCache(*(_host_pages(pages, slots, pinned) for pages in cache))
                for cache in self._caches
            ]
        return self._host

    @staticmethod
    def _check(kind: str, moves: list[BlockCopy], source: _Ids, target: _Ids) -> None:
        for ids, side in (([m.source for m in moves], source), ([m.target for m in moves], target)):
            low, high = min(ids), max(ids)
            if low < side.low or high > side.high:
                raise RuntimeError(
                    f"{kind}: {side.name} must be in [{side.low}, {side.high}], got {low} to {high}"
                )
        if len({move.target for move in moves}) != len(moves):
            raise RuntimeError(f"{kind}: one of {len(moves)} targets is written twice")

    @staticmethod
    def _move(
        moves: list[BlockCopy], sources: Sequence[LayerCache], targets: Sequence[LayerCache]
    ) -> None:
        from_ids = torch.tensor([m.source for m in moves], device=sources[0].keys.device)
        to_ids = torch.tensor([m.target for m in moves], device=targets[0].keys.device)
        for source, target in zip(sources, targets, strict=True):
            for read, written in zip(source, target, strict=True):
                # One layer at a time: what is in between takes a layer's share of memory only.
                blocks = read.index_select(0, from_ids)
                written.index_copy_(0, to_ids, blocks.to(written.device))


def _host_pages(pages: torch.Tensor, slots: int, pinned: bool) -> torch.Tensor:
    return torch.empty((slots, *pages.shape[1:]), dtype=pages.dtype, pin_memory=pinned)
