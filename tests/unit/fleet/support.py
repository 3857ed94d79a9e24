"""A fleet without engines: snapshots with made-up loads, and a courier that writes down."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.load import EngineLoad
from cluster.fleet.job import Job
from cluster.fleet.snapshot import EngineCapacity, EngineSnapshot

BLOCK = 16


def capacity(blocks: int = 100, seqs: int = 8, longest: int = 1600) -> EngineCapacity:
    return EngineCapacity(longest, BLOCK, blocks, seqs, 256)


def load(**values: object) -> EngineLoad:
    gauges: dict[str, object] = {
        "step": 1,
        "blocks_free": 100,
        "blocks_total": 100,
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "tokens_per_s": 0.0,
        "emitted_tokens": 0,
        "preemptions": 0,
        "recomputed_tokens": 0,
    } | values
    gauges.setdefault("room", gauges["blocks_free"])
    return EngineLoad(**gauges)  # type: ignore[arg-type]


def engine(name: str, blocks: int = 100, seqs: int = 8, **values: object) -> EngineSnapshot:
    snapshot = EngineSnapshot(name, capacity(blocks, seqs, blocks * BLOCK))
    gauges: dict[str, object] = {"blocks_free": blocks, "blocks_total": blocks} | values
    snapshot.updated(load(**gauges), seen=0)
    return snapshot


def job(tokens: int = 16, output: int = 16, **values: object) -> Job:
    return Job(tokens, tokens + output, **values)  # type: ignore[arg-type]


@dataclass
class Notebook:
    """Writes down what a fleet wants carried out."""

    sent: list[tuple[Job, str]] = field(default_factory=list)
    taken_back: list[Job] = field(default_factory=list)

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        self.sent.append((job, engine.engine_id))
        return len(self.sent)

    def take_back(self, job: Job) -> None:
        self.taken_back.append(job)

    def where(self, job: Job) -> str | None:
        return next((name for it, name in reversed(self.sent) if it is job), None)
