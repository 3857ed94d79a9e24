"""What a request changes about its logits before a token is drawn: bias, penalties, bans.

In this order (that of vLLM): the bias is added; the repetition penalty scales and the two others
are taken off; what is not allowed, and stop tokens before min_tokens, become -inf. Only the entries
that are named are touched, all rows' entries at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from cluster.core.sampling import SamplingParams
from workers.history import TokenHistory


class Adjustable(Protocol):
    """A row to draw (workers.sampler.Draw)."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def output_index(self) -> int: ...

    @property
    def history(self) -> TokenHistory | None: ...


def adjusted(logits: torch.Tensor, draws: Sequence[Adjustable]) -> torch.Tensor:
    """Logits as the requests want them, [rows, vocab], in fp32 unless none of them wants anything;
    `logits` is not changed.

    NaN and +inf stay: such a row must fail, its logits cannot be trusted.
    """
    if not any(_touches(draw) for draw in draws):
        return logits
    scores = logits.to(torch.float32)
    if scores is logits:
        scores = scores.clone()
    _add_bias(scores, draws)
    _penalise(scores, draws)
    _forbid_stops(scores, draws)
    for row, draw in enumerate(draws):
        if draw.params.allowed_token_ids:
            _allow_only(scores[row], draw.params.allowed_token_ids)
    return scores


def _touches(draw: Adjustable) -> bool:
    params = draw.params
    bans = params.allowed_token_ids or draw.output_index < params.min_tokens
    return bool(bans or params.logit_bias or params.penalises)


def _add_bias(scores: torch.Tensor, draws: Sequence[Adjustable]) -> None:
    vocab = scores.shape[1]
    entries = [
        (row, token_id, bias)
        for row, draw in enumerate(draws)
        for token_id, bias in draw.params.logit_bias
        if token_id < vocab
    ]
    if entries:
        rows, ids, biases = (
            torch.tensor(part, device=scores.device) for part in zip(*entries, strict=True)
        )
        scores[rows, ids] += biases.to(scores.dtype)


def _penalise(scores: torch.Tensor, draws: Sequence[Adjustable]) -> None:
    rows: list[int] = []
    held: list[TokenHistory] = []
    for row, draw in enumerate(draws):
        if not draw.params.penalises:
            continue
        if draw.history is None:
            raise RuntimeError(f"row {row} has penalties but no history")
        rows.append(row)
        held.append(draw.history)
    if not rows:
        return
    sizes = [len(history.ids) for history in held]

    def per_entry(values: list[float]) -> torch.Tensor:
        repeated = np.repeat(np.array(values, dtype=np.float32), sizes)
        return torch.from_numpy(repeated).to(scores.device)

    params = [draws[row].params for row in rows]
    at = (
        torch.from_numpy(np.repeat(np.array(rows), sizes)).to(scores.device),
        torch.from_numpy(np.concatenate([h.ids for h in held])).to(scores.device),
    )
    counts = torch.from_numpy(np.concatenate([h.output_counts for h in held])).to(scores.device)
    values = scores[at]
    repetition = per_entry([p.repetition_penalty for p in params])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_entry([p.frequency_penalty for p in params]) * counts
    values -= per_entry([p.presence_penalty for p in params]) * (counts > 0)
    scores[at] = values


def _forbid_stops(scores: torch.Tensor, draws: Sequence[Adjustable]) -> None:
    vocab = scores.shape[1]
    entries = [
        (row, token_id)
        for row, draw in enumerate(draws)
        if draw.output_index < draw.params.min_tokens
        for token_id in draw.params.stop_token_ids
        if token_id < vocab
    ]
    if entries:
        rows, ids = (
            torch.tensor(part, device=scores.device) for part in zip(*entries, strict=True)
        )
        values = scores[rows, ids]
        scores[rows, ids] = _banned(values)


def _allow_only(row: torch.Tensor, allowed: tuple[int, ...]) -> None:
    ids = torch.tensor([i for i in allowed if i < len(row)], device=row.device, dtype=torch.int64)
    kept = row[ids]
    row.copy_(_banned(row))
    row[ids] = kept


def _banned(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values < float("inf"), float("-inf"))
