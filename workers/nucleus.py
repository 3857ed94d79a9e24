"""Drawing under top-k, top-p and min-p from the few most likely tokens only.

The kept set of each filter is a prefix of the tokens in the canonical order (higher logit first,
lower id first among equals), so their intersection is one as well. On CPUs the compiled kernels
select it (native/nucleus.cpp). Elsewhere the search starts with the 64 most likely tokens. Rows
whose prefix does not provably end within them get a second try as wide as a histogram of their
weights asks for, and then twice that; how wide a search was never shows in its result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workers.native import bindings
from workers.race import exponentials, token_weights

FIRST_WIDTH = 64
_SORT_ALL_ABOVE = 0.25
"""From this share of the vocabulary on, sorting all of it costs less than selecting first."""
_BINS_PER_NAT = 4
_BINS = 256
_DEEPEST_NATS = (_BINS - 1) / _BINS_PER_NAT


class Filters(NamedTuple):
    """Per row, [rows]. Applied in this order; top_p counts probabilities after top_k.

    temperature: fp64. top_k: int64 in [1, vocab]. top_p: fp64 in (0, 1]. min_p: fp64 in [0, 1].
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def draw_filtered(
    scores: torch.Tensor, peaks: torch.Tensor, filters: Filters, keys: torch.Tensor
) -> torch.Tensor:
    """One id per row, [rows] int64: a race between the kept tokens (workers.race).

    scores: [rows, vocab], any float type. peaks: [rows] fp32 row maxima. keys: [rows, 2] int32.
    """
    kernels = bindings.kernels_for(scores)
    if kernels is not None and scores.is_contiguous():
        return _drawn_by(kernels, scores, peaks, filters, keys)
    job = _Job(scores, peaks, filters, _totals(scores, peaks, filters), keys)
    chosen, proven = _try(job, min(FIRST_WIDTH, scores.shape[1]))
    unproven = (~proven).nonzero()[:, 0]
    if len(unproven):
        chosen[unproven] = _draw_wider(job.select(unproven))
    return chosen


def _drawn_by(
    kernels: bindings.Kernels,
    scores: torch.Tensor,
    peaks: torch.Tensor,
    filters: Filters,
    keys: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = scores.shape
    ids = torch.empty(rows, dtype=torch.int32)
    arguments = [tensor.contiguous() for tensor in (peaks, *filters, keys)]
    kernels.draw_filtered(
        scores.data_ptr(),
        *(tensor.data_ptr() for tensor in arguments),
        rows,
        vocab,
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return ids.to(torch.int64)


class _Job(NamedTuple):
    """The rows to draw. totals: as `_totals` returns them."""

    scores: torch.Tensor
    peaks: torch.Tensor
    filters: Filters
    totals: torch.Tensor
    keys: torch.Tensor

    def select(self, rows: torch.Tensor) -> _Job:
        """A job of those rows alone. rows: indices."""
        return _Job(
            self.scores[rows],
            self.peaks[rows],
            Filters(*(values[rows] for values in self.filters)),
            self.totals[rows],
            self.keys[rows],
        )


def _totals(scores: torch.Tensor, peaks: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[rows] fp64: the weight of the whole vocabulary, for top-p rows without top-k; else inf."""
    totals = torch.full((len(scores),), float("inf"), dtype=torch.float64, device=scores.device)
    needed = (filters.top_p < 1.0) & (filters.top_k == scores.shape[1])
    rows = needed.nonzero()[:, 0]
    if len(rows):
        selected = scores if len(rows) == len(scores) else scores[rows]
        weights = token_weights(selected, peaks[rows], filters.temperature[rows])
        totals[rows] = weights.sum(-1, dtype=torch.float64)
    return totals


def _try(job: _Job, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the `width` most likely tokens: ids [rows], and whether each is proven [rows].

    Proven: what is kept does not depend on tokens outside of the candidates.
    """
    vocab, filters = job.scores.shape[1], job.filters
    values, ids = _candidates(job.scores, width)
    exponents = values.to(torch.float64) - job.peaks.to(torch.float64)[:, None]
    weights = (exponents / filters.temperature[:, None]).exp()
    cumulative = weights.cumsum(-1)
    # Tokens equal to the last candidate may be missing: only what is strictly above is complete.
    complete = (values > values[:, -1:]).sum(-1)
    if width == vocab:
        complete = torch.full_like(complete, vocab)
    top_k = filters.top_k
    whole = top_k == vocab
    known_mass = cumulative.gather(1, top_k.clamp(max=width)[:, None] - 1)[:, 0]
    threshold = filters.top_p * torch.where(whole, job.totals, known_mass)
    enough = (cumulative < threshold[:, None]).sum(-1) + 1
    enough = torch.where(filters.top_p < 1.0, enough, vocab)
    likely = (weights >= filters.min_p[:, None]).sum(-1)
    likely = torch.where(filters.min_p > 0.0, likely, vocab)
    kept = torch.minimum(torch.minimum(top_k, enough), likely)
    # With fewer than top_k candidates the mass that top_p is a share of is not known yet.
    mass_known = whole | (filters.top_p == 1.0) | (top_k <= complete)
    chosen = _race(ids, weights, kept.clamp(max=width), job.keys)
    return chosen, (kept <= complete) & mass_known


def _candidates(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row in canonical order: values and ids, [rows, width]."""
    if width == scores.shape[1]:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    _, ids = scores.topk(width, dim=-1, sorted=False)
    # topk leaves the order of equals open.
    ids, _ = ids.sort(dim=-1)
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _race(
    ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    speeds = weights.to(torch.float32) / exponentials(keys, ids)
    position = torch.arange(ids.shape[1], device=ids.device)
    speeds = speeds.masked_fill(position >= kept[:, None], -1.0)
    return ids.gather(1, speeds.argmax(-1, keepdim=True))[:, 0]


# -- the second try ----------------------------------------------------------------------------


def _draw_wider(job: _Job) -> torch.Tensor:
    """Tokens of rows for which the first width was not enough, [rows]."""
    vocab = job.scores.shape[1]
    widths = _estimate(job)
    rows = torch.arange(len(widths), device=widths.device)
    token_ids = torch.zeros_like(rows)
    while len(rows):
        widths = torch.where(widths > _SORT_ALL_ABOVE * vocab, vocab, widths)
        # Rows of about the same width go together; a flat one does not slow down the others.
        together = widths <= 2 * widths.min()
        width = int(widths[together].max())
        chosen, proven = _try(job.select(rows[together]), width)
        token_ids[rows[together][proven]] = chosen[proven]
        unproven = ~together
        unproven[together] = ~proven
        widths = torch.where(together, 2 * width, widths)[unproven]
        rows = rows[unproven]
    return token_ids


def _estimate(job: _Job) -> torch.Tensor:
    """[rows]: about how many candidates will prove each row, rather too many than too few."""
    filters, (rows, vocab) = job.filters, job.scores.shape
    by_count = torch.where(filters.top_k < vocab, filters.top_k * 5 // 4, vocab)
    if bool((by_count < vocab).all()):
        return by_count.clamp(min=2 * FIRST_WIDTH)
    temperature = filters.temperature.to(torch.float32)[:, None]
    depth = ((job.peaks[:, None] - job.scores) / temperature).clamp_(max=_DEEPEST_NATS)
    bins = (depth * _BINS_PER_NAT).to(torch.int64)
    bins += torch.arange(rows, device=bins.device)[:, None] * _BINS
    flat = bins.flatten()
    counts = flat.bincount(minlength=rows * _BINS).view(rows, _BINS).cumsum(-1)
    weights = depth.neg_().exp_().flatten()
    mass = flat.bincount(weights, rows * _BINS).view(rows, _BINS).cumsum(-1)
    # The bin in which top-p is reached, and the one in which min-p lies; the last for no filter.
    top_p_bin = (mass < (filters.top_p * job.totals)[:, None]).sum(-1)
    min_p_bin = (-filters.min_p.log()).clamp(max=_DEEPEST_NATS) * _BINS_PER_NAT
    last_bin = torch.minimum(top_p_bin, min_p_bin.to(torch.int64)).clamp(max=_BINS - 1)
    # Past the last kept token, one that is strictly less likely must be seen.
    needed = counts.gather(1, last_bin[:, None])[:, 0] + 1
    return torch.minimum(needed, by_count).clamp(min=2 * FIRST_WIDTH)
