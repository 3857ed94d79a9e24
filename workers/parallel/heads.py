"""Which part of a model each rank of a tensor-parallel group computes (Shoeybi et al., 2019)."""

from __future__ import annotations

from typing import NamedTuple

from workers.parallel.collectives import Shard

_ALIGNMENT = 16
"""Columns of a split product are a multiple of this on every rank: whole vectors and tiles."""


class Span(NamedTuple):
    """Elements [begin, end) of a dimension, filled up with zeros to `size`."""

    begin: int
    end: int
    size: int

    @property
    def real(self) -> int:
        """Elements that are not filling."""
        return self.end - self.begin

    def times(self, width: int) -> Span:
        """The same span where each element stands for `width`."""
        return Span(self.begin * width, self.end * width, self.size * width)


class LocalHeads(NamedTuple):
    """One rank's query heads and the KV heads beside them, in the order of the model. Query head
    i of a rank reads KV head i // (query.size // kv.size) of the same rank, as in the model."""

    query: Span
    kv: Span


def whole(total: int) -> Span:
    """A dimension that is not split."""
    return Span(0, total, total)


def split(total: int, shard: Shard) -> Span:
    """A rank's part of a dimension, in order of ranks, the same size on all of them."""
    if shard.size == 1:
        return whole(total)
    return _part(total, -(-total // (shard.size * _ALIGNMENT)) * _ALIGNMENT, shard.rank)


def split_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> LocalHeads:
    """A rank's heads. num_heads is a multiple of num_kv_heads.

    With at least as many KV heads as ranks, a rank takes whole groups. With fewer, a KV head
    is on several ranks, with a part of its query heads on each. Heads that do not divide are
    filled up with zero heads: every rank has as many as any other.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= shard.size:
        kv = _part(num_kv_heads, -(-num_kv_heads // shard.size), shard.rank)
        return LocalHeads(kv.times(group), kv)
    copies = shard.size // num_kv_heads
    owner, copy = divmod(shard.rank, copies)
    size = -(-group // copies)
    if owner >= num_kv_heads:
        return LocalHeads(Span(0, 0, size), Span(0, 0, 1))
    part = _part(group, size, copy)
    first = owner * group
    return LocalHeads(Span(first + part.begin, first + part.end, size), Span(owner, owner + 1, 1))


def _part(total: int, size: int, rank: int) -> Span:
    return Span(min(rank * size, total), min((rank + 1) * size, total), size)
