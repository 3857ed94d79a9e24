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
from workers.named import NO_IDS, NamedIds


class Adjustable(Protocol):
    """A row to draw (workers.sampler.Draw)."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def output_index(self) -> int: ...

    @property
    def history(self) -> TokenHistory | None: ...

    @property
    def named(self) -> NamedIds | None: ...


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
    vocab = scores.shape[1]
    named = [_named(draw, vocab) for draw in draws]
    _add_bias(scores, named)
    _penalise(scores, draws)
    early = [draw.output_index < draw.params.min_tokens for draw in draws]
    _forbid(scores, [ids.stops if soon else None for ids, soon in zip(named, early, strict=True)])
    for row, ids in enumerate(named):
        if ids.allowed is not None:
            _allow_only(scores[row], ids.allowed)
    return scores


def _touches(draw: Adjustable) -> bool:
    params = draw.params
    bans = params.allowed_token_ids or draw.output_index < params.min_tokens
    return bool(bans or params.logit_bias or params.penalises)


def _named(draw: Adjustable, vocab: int) -> NamedIds:
    if draw.named is not None:
        return draw.named
    return NamedIds(draw.params, vocab) if draw.params.names_ids else NO_IDS


def _add_bias(scores: torch.Tensor, named: Sequence[NamedIds]) -> None:
    at = _entries(scores, [ids.bias_ids for ids in named])
    if at is not None:
        biases = np.concatenate([ids.biases for ids in named if ids.biases is not None])
        scores[at] += torch.from_numpy(biases).to(scores.device)


def _penalise(scores: torch.Tensor, draws: Sequence[Adjustable]) -> None:
    held = [_history_of(row, draw) for row, draw in enumerate(draws)]
    at = _entries(scores, [None if history is None else history.ids for history in held])
    if at is None:
        return
    pairs = zip(draws, held, strict=True)
    penalised = [(draw.params, history) for draw, history in pairs if history is not None]
    sizes = [len(history.ids) for _, history in penalised]

    def per_entry(values: list[float]) -> torch.Tensor:
        repeated = np.repeat(np.array(values, dtype=np.float32), sizes)
        return torch.from_numpy(repeated).to(scores.device)

    counts = np.concatenate([history.output_counts for _, history in penalised])
    held_counts = torch.from_numpy(counts).to(scores.device)
    values = scores[at]
    repetition = per_entry([p.repetition_penalty for p, _ in penalised])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_entry([p.frequency_penalty for p, _ in penalised]) * held_counts
    values -= per_entry([p.presence_penalty for p, _ in penalised]) * (held_counts > 0)
    scores[at] = values


def _history_of(row: int, draw: Adjustable) -> TokenHistory | None:
    """None where nothing is penalised."""
    if not draw.params.penalises:
        return None
    if draw.history is None:
        raise RuntimeError(f"row {row} has penalties but no history")
    return draw.history


def _forbid(scores: torch.Tensor, ids: Sequence[np.ndarray | None]) -> None:
    at = _entries(scores, ids)
    if at is not None:
        scores[at] = _banned(scores[at])


def _allow_only(row: torch.Tensor, allowed: np.ndarray) -> None:
    ids = torch.from_numpy(allowed).to(row.device)
    kept = row[ids]
    row.copy_(_banned(row))
    row[ids] = kept


def _entries(
    scores: torch.Tensor, ids: Sequence[np.ndarray | None]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Index of the named entries of all rows, row by row; None if there are none."""
    sizes = [0 if one is None else len(one) for one in ids]
    if not any(sizes):
        return None
    rows = np.repeat(np.arange(len(ids)), sizes)
    columns = np.concatenate([one for one in ids if one is not None])
    return torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)


def _banned(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values < float("inf"), float("-inf"))
