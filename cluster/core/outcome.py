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


class Refusal(str, Enum):
    """Why a request was turned away though nothing is wrong with it. Few on purpose: they are the
    label of a metric."""

    CALLS = "calls"
    """As many calls as the router takes are in progress."""
    STREAMS = "streams"
    """As many streams as the router takes are in flight."""
    TOKENIZER = "tokenizer"
    """Too many prompts wait to be tokenised."""
    QUEUED_REQUESTS = "queued_requests"
    """As many requests of its tenant wait as may."""
    QUEUED_TOKENS = "queued_tokens"
    """As many prompt tokens of its tenant wait as may."""
    OBJECTIVE = "objective"
    """It could not begin in time."""
    QUEUE_TIMEOUT = "queue_timeout"
    """No engine had room within the time that it may wait."""
    NO_ENGINE = "no_engine"
    """No engine that could hold it is there."""
    ENGINES_LOST = "engines_lost"
    """It lost its engine too often."""
    SHUTDOWN = "shutdown"
    """The router is about to stop."""
    OTHER = "other"


class DrainOrder(str, Enum):
    """What an operator wants of an engine."""

    FINISH = "finish"
    """Take nothing new."""
    MOVE = "move"
    """That, and let what it has go on elsewhere."""
    UNDO = "undo"
    """Take work again."""


class LossCause(str, Enum):
    """How a router lost an engine, or its streams there. Label of a metric."""

    CLOSED = "closed"
    """Its end of the connection went away: it died, or its node."""
    LEFT = "left"
    """It said goodbye: it stops, or its step loop has died."""
    SILENT = "silent"
    """No frame in time: it hangs, or the network does."""
    EMPTIED = "emptied"
    """An operator wants it to have no streams; the engine itself stays."""
    BROKEN = "broken"
    """What it sent was not the protocol, or not in order."""


ENGINE_LOSSES = tuple(cause for cause in LossCause if cause is not LossCause.EMPTIED)
"""Those after which the router has the engine no more."""


class ResumedFrom(str, Enum):
    """Where a stream was kept that a client came back to. Label of a metric."""

    HERE = "here"
    ENGINE = "engine"
    """Another router had it; its engine handed it over."""


class Outcome(NamedTuple):
    """One token that a step emitted for one sequence; `index` counts output tokens from 0."""

    seq_id: SequenceId
    index: int  # type: ignore[assignment]  # a field here; nobody needs tuple.index
    token_id: TokenId
    finish: FinishReason | None
