"""What travels on the hop. Every message is a MessagePack array that starts with its tag; msgspec
checks types and lengths while it decodes, so nothing unchecked gets past this file.

Up (router to engine): Hello once, then Submit, Abort, Pause, Resume; Adopt, Forget, Drain.
Down (engine to router): Welcome once, then a Frame per step, or every 200 ms when idle; Adopted.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from cluster.core.ids import TokenId
from cluster.core.load import EngineLoad
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder, FinishReason
from cluster.core.sampling import SamplingParams
from cluster.engine.core import Scores, StreamStats

PROTOCOL_VERSION = 3
RESUMED_ELSEWHERE = "the stream goes on at another router"
"""Reason of a Failure that is none."""
EMPTIED = "an operator wants the engine to have no streams"
"""Likewise: the stream is to be produced elsewhere."""
MAX_FRAME_BYTES = 16 << 20
"""Larger frames are refused before they are read: a prompt of 1M tokens takes 5 MiB."""

TokenIds: TypeAlias = Annotated[list[TokenId], msgspec.Meta(max_length=1 << 20)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
StreamId: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 62))]


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """A router introduces itself. secret: the cluster's, compared in constant time."""

    version: int
    router_id: Name
    secret: Name


class Keep(msgspec.Struct, array_like=True, frozen=True):
    """A stream that its client wants to be able to resume, from another router if need be.

    token: names it; whoever knows it may resume. window_s: how long it is kept without a router.
    request_id, stop, session: what a router needs besides the log.
    """

    token: Name
    window_s: float
    request_id: Name
    stop: list[str]
    session: Name


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A token log to be continued; stream ids of a connection only ever grow."""

    stream: StreamId
    prompt_ids: TokenIds
    emitted_ids: TokenIds
    sampling: SamplingParams
    tenant: Name = ""
    priority: int = 0
    ttft_objective_s: float | None = None
    keep: Keep | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    stream: StreamId


class Pause(msgspec.Struct, tag="pause", array_like=True, frozen=True):
    """The stream's reader is slow: give its blocks to others until Resume."""

    stream: StreamId


class Resume(msgspec.Struct, tag="resume", array_like=True, frozen=True):
    stream: StreamId


class Adopt(msgspec.Struct, tag="adopt", array_like=True, frozen=True):
    """Asks for the log of a stream that another router had. number: comes back in Adopted."""

    number: int
    token: Name


class Forget(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """A kept log that nobody will ask for."""

    token: Name


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """An operator's word."""

    order: DrainOrder


class KeptLog(msgspec.Struct, array_like=True, frozen=True):
    """A stream's log as the engine knew it; finish is set if it is complete. scores: of the last
    ids, as many as were produced while it was there."""

    keep: Keep
    prompt_ids: TokenIds
    emitted_ids: TokenIds
    sampling: SamplingParams
    tenant: Name
    priority: int
    finish: FinishReason | None
    scores: Scores


class Adopted(msgspec.Struct, tag="adopted", array_like=True, frozen=True):
    """log: None when this engine does not know the token."""

    number: int
    log: KeptLog | None


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """epoch: grows with every start of an engine of this id; tokens of older epochs are void.
    max_sequence_len: prompt + output tokens of one sequence at most, here. max_num_seqs,
    max_num_batched_tokens: sequences at once and tokens per step at most. metrics_port: where it is
    scraped, on the same host; 0 for nowhere."""

    version: int
    engine_id: Name
    epoch: int
    model: ModelInfo
    max_sequence_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    metrics_port: int = 0


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, frozen=True):
    """The engine refuses the connection, or ends it on purpose."""

    reason: Name


class Tokens(msgspec.Struct, tag="t", array_like=True, frozen=True):
    """One stream's part of a frame."""

    stream: StreamId
    first_index: int
    token_ids: TokenIds
    finish: FinishReason | None = None
    stats: StreamStats | None = None
    scores: Scores | None = None


class WaitingPart(msgspec.Struct, tag="w", array_like=True, frozen=True):
    """One of the router's streams that has no blocks at present (engine.core.WaitingStream)."""

    stream: StreamId
    tokens: int
    preemptions: int


class Failure(msgspec.Struct, tag="f", array_like=True, frozen=True):
    """A stream ends without a finish; `invalid` lists (field, description) of a refused request."""

    stream: StreamId
    reason: str
    invalid: list[tuple[str, str]]


class Frame(msgspec.Struct, tag="frame", array_like=True, frozen=True):
    """One step for one router; with no tokens it is a heartbeat.

    emit_s: Unix seconds at the engine. seen: the largest stream id whose Submit the load reflects.
    waiting: the first of the router's streams that wait, in the engine's order. draining: no new
    streams, please.
    """

    epoch: int
    emit_s: float
    load: EngineLoad
    seen: int
    tokens: list[Tokens]
    failures: list[Failure]
    waiting: list[WaitingPart] = msgspec.field(default_factory=list)
    draining: bool = False


Up: TypeAlias = Hello | Submit | Abort | Pause | Resume | Adopt | Forget | Drain
Down: TypeAlias = Welcome | Goodbye | Frame | Adopted
