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
from workers.named import NamedIds
from workers.nucleus import Filters, draw_filtered
from workers.race import draw_unfiltered, largest
from workers.upload import upload

NOT_FINITE = "the logits are not finite"
FAILED_TOKEN = -1


class Draw(NamedTuple):
    """One row to draw: its parameters and the output index of the token, from 0.

    history: the tokens before it; needed where the parameters penalise. named: what the parameters
    name of the vocabulary; made of them for this draw where it is not given.
    """

    params: SamplingParams
    output_index: int
    history: TokenHistory | None = None
    named: NamedIds | None = None


class Drawn(NamedTuple):
    """token_ids: one per row, -1 where the row failed. failed: row -> reason."""

    token_ids: list[int]
    failed: dict[int, str]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw one token per row and read the ids: see `draw_ids`."""
    if not draws:
        return Drawn([], {})
    return drawn_from(draw_ids(logits, draws).tolist())


def drawn_from(token_ids: list[int]) -> Drawn:
    """What `draw_ids` drew, once it has been read."""
    failed = {row: NOT_FINITE for row, ok in enumerate(token_ids) if ok == FAILED_TOKEN}
    return Drawn(token_ids, failed)


def draw_ids(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token per row, at least one: [rows] int64 on the logits' device, FAILED_TOKEN where
    a row failed. logits: [rows, vocab], any float type; not changed.

    A row whose logits hold NaN or +inf, or no finite entry, fails alone; its neighbours draw as
    if it were not there. On a GPU nobody waits for it, unless rows are filtered: how wide these
    have to search depends on what they find.
    """
    scores = adjusted(logits, draws)
    peaks, token_ids = largest(scores)
    finite = torch.isfinite(peaks)
    drawn = [r for r, draw in enumerate(draws) if not draw.params.greedy]
    unfiltered = [r for r in drawn if not _filters(draws[r].params, scores)]
    filtered = [r for r in drawn if _filters(draws[r].params, scores)]
    if filtered:
        # A search among what is not finite would lead nowhere.
        sound = finite.tolist()
        filtered = [r for r in filtered if sound[r]]
    for draw_rows, rows in ((_draw_unfiltered, unfiltered), (_draw_filtered, filtered)):
        if rows:
            chosen = draw_rows(
                _select(scores, rows), _select(peaks, rows), [draws[r] for r in rows]
            )
            token_ids = _replaced(token_ids, rows, chosen)
    return token_ids.masked_fill_(~finite, FAILED_TOKEN)


def _filters(params: SamplingParams, scores: torch.Tensor) -> bool:
    return 0 < params.top_k < scores.shape[1] or params.top_p < 1.0 or params.min_p > 0.0


def _select(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """tensor[rows], without a copy when that is all of it."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[upload(rows, torch.int64, tensor.device)]


def _replaced(token_ids: torch.Tensor, rows: list[int], chosen: torch.Tensor) -> torch.Tensor:
    """token_ids with `chosen` at `rows`."""
    if len(rows) == len(token_ids):
        return chosen
    token_ids[upload(rows, torch.int64, token_ids.device)] = chosen
    return token_ids


def _draw_unfiltered(scores: torch.Tensor, peaks: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    return draw_unfiltered(scores, peaks, _temperatures(draws, scores), _keys(draws, scores))


def _draw_filtered(scores: torch.Tensor, peaks: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
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
    return upload(values, torch.float64, like.device)


def _keys(draws: list[Draw], like: torch.Tensor) -> torch.Tensor:
    """[rows, 2] int32: the halves of each row's counter_key."""
    keys = [counter_key(draw.params.seed, draw.output_index) for draw in draws]
    halves = [[key & 0xFFFFFFFF, key >> 32] for key in keys]
    return upload(halves, torch.int64, like.device).to(torch.int32)
