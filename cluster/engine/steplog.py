"""The step log: everything that went into an engine's decisions, so that they can be made again.

An engine is a pure function of its commands, the step results and the times at which they came.
The log holds exactly these; replaying it through a fresh scheduler must give the same plans, so a
report from the field becomes a test. It contains the token ids of prompts and outputs.

File format: a sequence of records, each 4 bytes of length (big endian) and a MessagePack array
that begins with its tag; the first is a LogHeader.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, TypeAlias

import msgspec

from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError, HeadwayError
from cluster.core.ids import TokenId
from cluster.core.plan import StepPlan, StepResult
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.core.request import EngineRequest
from cluster.engine.core import EngineCore, StepReport, StreamFailure, StreamKey

VERSION = 1
MAX_RECORD_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")


class LogHeader(msgspec.Struct, tag="log", array_like=True, frozen=True):
    version: int
    config: SchedulerConfig
    policies: PolicyChoice


class Submitted(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    now: float
    key: StreamKey
    request: EngineRequest


class Commanded(msgspec.Struct, tag="command", array_like=True, frozen=True):
    verb: Literal["abort", "pause", "resume"]
    key: StreamKey


class Planned(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """A plan was asked for. step 0 and an empty digest: there was nothing to run."""

    now: float
    step: int
    tokens: int
    digest: bytes


class Completed(msgspec.Struct, tag="result", array_like=True, frozen=True):
    now: float
    step: int
    token_ids: list[TokenId]
    elapsed_s: float
    failed: dict[int, str]


Record: TypeAlias = LogHeader | Submitted | Commanded | Planned | Completed
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def plan_digest(plan: StepPlan) -> bytes:
    """64 bits over all that an executor is told."""
    return hashlib.blake2b(_encoder.encode(plan), digest_size=8).digest()


class RecordingCore(EngineCore):
    """An EngineCore that writes down what it is told, before it acts."""

    def __init__(self, choice: PolicyChoice, config: SchedulerConfig, out: IO[bytes]) -> None:
        super().__init__(make_scheduler(config, choice))
        self._out = out
        self._write(LogHeader(VERSION, config, choice))

    def submit(self, key: StreamKey, request: EngineRequest, now: float) -> StreamFailure | None:
        self._write(Submitted(now, key, request))
        return super().submit(key, request, now)

    def abort(self, key: StreamKey) -> None:
        self._write(Commanded("abort", key))
        super().abort(key)

    def pause(self, key: StreamKey) -> None:
        self._write(Commanded("pause", key))
        super().pause(key)

    def resume(self, key: StreamKey) -> None:
        self._write(Commanded("resume", key))
        super().resume(key)

    def begin_step(self, now: float) -> StepPlan | None:
        plan = super().begin_step(now)
        if plan is not None:
            self._write(Planned(now, plan.step, plan.num_tokens, plan_digest(plan)))
        elif len(self.scheduler):
            self._write(Planned(now, 0, 0, b""))
        return plan

    def complete_step(self, result: StepResult, now: float) -> StepReport:
        done = Completed(now, result.step, result.token_ids, result.elapsed_s, result.failed)
        self._write(done)
        return super().complete_step(result, now)

    def _write(self, record: Record) -> None:
        body = _encoder.encode(record)
        self._out.write(_LENGTH.pack(len(body)) + body)


def read_log(path: Path) -> Iterator[Record]:
    """The records of a log. A last record that was cut off (the engine was killed) is left out.

    Raises ConfigError naming the record that is damaged.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with file:
        number = 0
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            number += 1
            (length,) = _LENGTH.unpack(prefix)
            if length > MAX_RECORD_BYTES:
                raise ConfigError(
                    f"{path}: record {number} claims {length} bytes, limit {MAX_RECORD_BYTES}; "
                    "this is no step log"
                )
            body = file.read(length)
            if len(body) < length:
                return
            try:
                yield _decoder.decode(body)
            except (msgspec.DecodeError, HeadwayError, OverflowError) as error:
                raise ConfigError(f"{path}: record {number}: {error}") from error
        if number == 0:
            raise ConfigError(f"{path}: is empty")


class Difference(HeadwayError):
    """A replay planned something else than the log says."""


class Replayed(msgspec.Struct, frozen=True):
    """What a replay went through."""

    steps: int
    tokens: int
    preemptions: int


def replay(path: Path) -> Replayed:
    """Run a log through a fresh engine. Raises Difference at the first plan that is not the same,
    ConfigError for a damaged log."""
    records = read_log(path)
    header = next(records)
    if not isinstance(header, LogHeader):
        raise ConfigError(f"{path}: does not begin with a header")
    if header.version != VERSION:
        raise ConfigError(f"{path}: log of version {header.version}, this is {VERSION}")
    core = EngineCore(make_scheduler(header.config, header.policies))
    for record in records:
        _apply(core, record)
    counters = core.scheduler.counters
    return Replayed(counters.steps, counters.emitted_tokens, counters.preemptions)


def _apply(core: EngineCore, record: Record) -> None:
    if isinstance(record, Planned):
        _compare(core.begin_step(record.now), record)
    elif isinstance(record, Completed):
        result = StepResult(record.step, record.token_ids, record.elapsed_s, record.failed)
        core.complete_step(result, record.now)
    elif isinstance(record, Submitted):
        core.submit(record.key, record.request, record.now)
    elif isinstance(record, Commanded):
        {"abort": core.abort, "pause": core.pause, "resume": core.resume}[record.verb](record.key)
    elif isinstance(record, LogHeader):
        raise ConfigError("a second header in one log")


def _compare(plan: StepPlan | None, record: Planned) -> None:
    if plan is None:
        if record.step:
            raise Difference(f"step {record.step} was planned, the replay has nothing to run")
        return
    if plan.step == record.step and plan_digest(plan) == record.digest:
        return
    raise Difference(
        f"step {record.step} had {record.tokens} tokens; the replay's step {plan.step} has "
        f"{plan.num_tokens}: {[(row.seq_id, row.start, row.count) for row in plan.rows]}"
    )
