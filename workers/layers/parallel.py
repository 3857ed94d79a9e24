"""Layers whose weights are split over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.layers.linear import Linear
from workers.parallel.collectives import Collectives
from workers.parallel.heads import Span

Lookup = Callable[[torch.Tensor], torch.Tensor]
"""Rows of a table: ids [n] -> [n, width]."""


def lookup(table: torch.Tensor) -> Lookup:
    """table: [n, width]."""
    return lambda ids: functional.embedding(ids, table)


class SummedLinear:
    """A product whose input dimension is split: the sum of the ranks' products.

    A bias belongs into one rank's product only.
    """

    def __init__(self, linear: Linear, collectives: Collectives) -> None:
        self.linear = linear
        self._collectives = collectives

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, the rank's part of the input] -> [rows, out], the same on every rank."""
        return self._collectives.all_reduce(self.linear(x))


class VocabEmbedding:
    """Rows of the embedding split by token id."""

    def __init__(self, rows: Lookup, span: Span, scale: float, collectives: Collectives) -> None:
        """rows: of the ids in `span`, the first being 0. scale: of what is looked up, in the
        embedding's dtype."""
        self._rows = rows
        self._span = span
        self._scale = scale
        self._collectives = collectives

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [T] -> [T, hidden], the same on every rank."""
        if self._collectives.shard.size == 1:
            return self._scaled(self._rows(token_ids))
        elsewhere = (token_ids < self._span.begin) | (token_ids >= self._span.end)
        rows = (token_ids - self._span.begin).masked_fill(elsewhere, 0)
        embedded = self._rows(rows).masked_fill(elsewhere[:, None], 0)
        return self._scaled(self._collectives.all_reduce(embedded))

    def _scaled(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded if self._scale == 1.0 else embedded.mul_(self._scale)


class VocabHead:
    """Logits of the vocabulary, its columns split by token id."""

    def __init__(
        self, linear: Linear, vocab_size: int, softcap: float, collectives: Collectives
    ) -> None:
        """linear: hidden -> the rank's columns; all ranks have equally many. softcap: a logit x
        becomes softcap * tanh(x / softcap); 0 for none."""
        self._linear = linear
        self._vocab_size = vocab_size
        self._softcap = softcap
        self._collectives = collectives

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """x: [R, hidden] -> on rank 0 [R, vocab]; None on the others."""
        if not len(x):
            empty = x.new_empty(0, self._vocab_size)
            return empty if self._collectives.shard.rank == 0 else None
        logits = self._collectives.gather(self._capped(self._linear(x)))
        if logits is None:
            return None
        # Where the vocabulary does not divide, the columns beyond it are filling.
        return logits[:, : self._vocab_size].contiguous()

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._softcap:
            return logits
        return logits.float().div_(self._softcap).tanh_().mul_(self._softcap).to(logits.dtype)
