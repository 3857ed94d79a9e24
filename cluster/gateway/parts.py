"""How many parts a message may have, and which of them are named when they are wrong.

A message of 4 MiB has room for two million ids. Were each of them looked at, or complained of, by
itself, the event loop would stand still for seconds, and with it everybody's streams. So parts are
counted before one of them is looked at, and the first that are wrong stand for all.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import islice

from cluster.core.errors import FieldViolation
from cluster.core.modelinfo import ModelInfo
from cluster.gateway.status import MAX_VIOLATIONS


def too_many(field: str, parts: Sized, most: int, what: str) -> list[FieldViolation]:
    """One violation or none."""
    if len(parts) <= most:
        return []
    return [FieldViolation(field, f"at most {most} {what}, got {len(parts)}")]


def id_violations(field: str, token_ids: Sequence[int], model: ModelInfo) -> list[FieldViolation]:
    """Of the first ids that the model has not, as many as a status has room for."""
    if not token_ids or max(token_ids) < model.vocab_size:
        return []
    wrong = ((at, one) for at, one in enumerate(token_ids) if one >= model.vocab_size)
    return [
        FieldViolation(f"{field}[{at}]", f"must be below {model.vocab_size}, got {one}")
        for at, one in islice(wrong, MAX_VIOLATIONS)
    ]
