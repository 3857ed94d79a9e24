"""Drawing under top-k, top-p and min-p from the few most likely tokens only.

The kept set of each filter is a prefix of the tokens in the canonical order (higher logit first,
lower id first among equals), so their intersection is one as well. The search starts with the 64
most likely tokens and widens for those rows whose prefix does not provably end within them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workers.inverse_cdf import block_weights

FIRST_WIDTH = 64
_WIDENING = 8


class Filters(NamedTuple):
    """Per row, [rows]. Applied in this order; top_p counts probabilities after top_k.

    temperature: fp64. top_k: int64 in [1, vocab]. top_p: fp64 in (0, 1]. min_p: fp64 in [0, 1].
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def select(self, rows: torch.Tensor) -> Filters:
        return Filters(*(values[rows] for values in self))


class _Prefix(NamedTuple):
    """Candidates in canonical order with their cumulative weights, and how many are kept.

    ids, cumulative: [rows, width]. kept: [rows]. proven: [rows], kept does not depend on tokens
    outside of the candidates.
    """

    ids: torch.Tensor
    cumulative: torch.Tensor
    kept: torch.Tensor
    proven: torch.Tensor


def draw_filtered(
    scores: torch.Tensor, peaks: torch.Tensor, filters: Filters, uniforms: torch.Tensor
) -> list[int]:
    """One id per row: inverse CDF over the kept tokens, most likely first.

    scores: [rows, vocab] fp32. peaks: [rows] fp32 row maxima. uniforms: [rows] fp64 in [0, 1).
    """
    rows, vocab = scores.shape
    totals = _totals(scores, peaks, filters)
    token_ids = torch.empty(rows, dtype=torch.int64, device=scores.device)
    pending = torch.arange(rows, device=scores.device)
    width = min(FIRST_WIDTH, vocab)
    while len(pending):
        everyone = len(pending) == rows
        prefix = _prefix(
            scores if everyone else scores[pending],
            peaks[pending],
            filters.select(pending),
            totals[pending],
            width,
        )
        chosen = _inverse(prefix, uniforms[pending])
        token_ids[pending[prefix.proven]] = chosen[prefix.proven]
        pending = pending[~prefix.proven]
        width = min(width * _WIDENING, vocab)
    return token_ids.tolist()


def _totals(scores: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[rows] fp64: the weight of the whole vocabulary, for top-p rows without top-k; else inf."""
    totals = torch.full((len(scores),), float("inf"), dtype=torch.float64, device=scores.device)
    needed = (filters.top_p < 1.0) & (filters.top_k == scores.shape[1])
    rows = needed.nonzero()[:, 0]
    if len(rows):
        selected = scores if len(rows) == len(scores) else scores[rows]
        _, cumulative = block_weights(selected, peaks[rows], filters.temperature[rows])
        totals[rows] = cumulative[:, -1]
    return totals


def _prefix(
    scores: torch.Tensor,
    peaks: torch.Tensor,
    filters: Filters,
    totals: torch.Tensor,
    width: int,
) -> _Prefix:
    vocab = scores.shape[1]
    values, ids = _candidates(scores, width)
    exponents = values.to(torch.float64) - peaks.to(torch.float64)[:, None]
    weights = (exponents / filters.temperature[:, None]).exp()
    cumulative = weights.cumsum(-1)
    # Tokens equal to the last candidate may be missing: only what is strictly above is complete.
    complete = (values > values[:, -1:]).sum(-1)
    if width == vocab:
        complete = torch.full_like(complete, vocab)
    top_k = filters.top_k
    whole = top_k == vocab
    mass = torch.where(
        whole, totals, cumulative.gather(1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    )
    threshold = (filters.top_p * mass)[:, None]
    enough = torch.where(filters.top_p < 1.0, (cumulative < threshold).sum(-1) + 1, vocab)
    likely = (weights >= filters.min_p[:, None]).sum(-1)
    likely = torch.where(filters.min_p > 0.0, likely, vocab)
    kept = torch.minimum(torch.minimum(top_k, enough), likely).clamp(min=1, max=vocab)
    # Below top_k candidates, the mass that top_p is a share of is not known yet.
    proven = (kept <= complete) & (whole | (filters.top_p == 1.0) | (top_k <= complete))
    return _Prefix(ids, cumulative, kept.clamp(max=width), proven)


def _candidates(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row in canonical order: values and ids, [rows, width]."""
    values, ids = scores.topk(width, dim=-1)
    # topk leaves the order of equals open.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _inverse(prefix: _Prefix, uniforms: torch.Tensor) -> torch.Tensor:
    last = prefix.kept[:, None] - 1
    target = uniforms[:, None] * prefix.cumulative.gather(1, last)
    position = torch.searchsorted(prefix.cumulative, target, right=True)
    return prefix.ids.gather(1, torch.minimum(position, last))[:, 0]
