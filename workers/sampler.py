"""Drawing the next token of each row, without sorting the vocabulary.

Every row is a pure function of (its logits, its parameters, its seed, its output index), and with
penalties of the tokens before it. Bias, penalties and bans change the logits first; then
  greedy        argmax, the lowest id wins a tie;
  unfiltered    a race between all tokens (workers.race);
  filtered      the same race between the kept tokens (workers.nucleus).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cluster.core.sampling import SamplingParams, counter_key
from workers.adjust import adjusted
from workers.history import TokenHistory
from workers.nucleus import Filters, draw_filtered
from workers.race import draw_unfiltered, largest

NOT_FINITE = "the logits are not finite"
FAILED_TOKEN = -1


class Draw(NamedTuple):
    """One row to draw: its parameters and the output index of the token, from 0.

    history: the tokens before it; needed where the parameters penalise.
    """

    params: SamplingParams
    output_index: int
    history: TokenHistory | None = None


class Drawn(NamedTuple):
    """token_ids: one per row, -1 where the row failed. failed: row -> reason."""

    token_ids: list[int]
    failed: dict[int, str]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw one token per row. logits: [rows, vocab], any float type; not changed.

    A row whose logits hold NaN or +inf, or no finite entry, fails alone; its neighbours draw as
    if it were not there.
    """
    if not draws:
        return Drawn([], {})
    scores = adjusted(logits, draws)
    peaks, greedy_ids = largest(scores)
    finite = torch.isfinite(peaks).tolist()
    token_ids = greedy_ids.tolist()
    failed = {row: NOT_FINITE for row, ok in enumerate(finite) if not ok}
    for row in failed:
        token_ids[row] = FAILED_TOKEN
    drawn = [r for r, draw in enumerate(draws) if finite[r] and not draw.params.greedy]
    for draw_rows, rows in (
        (_draw_unfiltered, [r for r in drawn if not _filters(draws[r].params, scores)]),
        (_draw_filtered, [r for r in drawn if _filters(draws[r].params, scores)]),
    ):
        if rows:
            chosen = draw_rows(
                _select(scores, rows), _select(peaks, rows), [draws[r] for r in rows]
            )
            for row, token_id in zip(rows, chosen, strict=True):
                token_ids[row] = token_id
    return Drawn(token_ids, failed)


def _filters(params: SamplingParams, scores: torch.Tensor) -> bool:
    return 0 < params.top_k < scores.shape[1] or params.top_p < 1.0 or params.min_p > 0.0


def _select(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """tensor[rows], without a copy when that is all of it."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[torch.tensor(rows, device=tensor.device)]


def _draw_unfiltered(scores: torch.Tensor, peaks: torch.Tensor, draws: list[Draw]) -> list[int]:
    return draw_unfiltered(scores, peaks, _temperatures(draws, scores), _keys(draws, scores))


def _draw_filtered(scores: torch.Tensor, peaks: torch.Tensor, draws: list[Draw]) -> list[int]:
    vocab = scores.shape[1]
    params = [draw.params for draw in draws]
    filters = Filters(
        temperature=_temperatures(draws, scores),
        top_k=torch.tensor([p.top_k or vocab for p in params], device=scores.device).clamp(
            max=vocab
        ),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scores.device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=scores.device),
    )
    return draw_filtered(scores, peaks, filters, _keys(draws, scores))


def _temperatures(draws: list[Draw], like: torch.Tensor) -> torch.Tensor:
    values = [draw.params.temperature for draw in draws]
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def _keys(draws: list[Draw], like: torch.Tensor) -> torch.Tensor:
    """[rows, 2] int32: the halves of each row's counter_key."""
    keys = [counter_key(draw.params.seed, draw.output_index) for draw in draws]
    halves = [[key & 0xFFFFFFFF, key >> 32] for key in keys]
    return torch.tensor(halves, dtype=torch.int64, device=like.device).to(torch.int32)
