"""What a committed step means for each sequence."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from cluster.core.ids import SequenceId, TokenId


class FinishReason(str, Enum):
    """Why a stream ended well. Failures are errors with a status, never a finish reason."""

    STOP = "stop"
    """A stop token (or, decided at the router, a stop string)."""
    LENGTH = "length"
    """max_tokens or the model's length limit was reached."""


class Outcome(NamedTuple):
    """One token that a step emitted for one sequence; `index` counts output tokens from 0."""

    seq_id: SequenceId
    index: int  # type: ignore[assignment]  # a field here; nobody needs tuple.index
    token_id: TokenId
    finish: FinishReason | None
