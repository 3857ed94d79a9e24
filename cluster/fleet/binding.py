"""When a job is tied to an engine."""

from __future__ import annotations

from typing import Protocol

from cluster.fleet.engines import EngineSet
from cluster.fleet.job import Job
from cluster.fleet.snapshot import EngineSnapshot


class Binding(Protocol):
    """Which engines may be given a job now."""

    name: str

    def drawn(self, engines: EngineSet) -> list[EngineSnapshot]:
        """Engines to look at, all where there are few."""

    def fits(self, engine: EngineSnapshot, job: Job) -> bool: ...


class LateBinding:
    """When an engine has room: until then the job waits at the router and can still go anywhere."""

    name = "late"

    def drawn(self, engines: EngineSet) -> list[EngineSnapshot]:
        return engines.draw_open()

    def fits(self, engine: EngineSnapshot, job: Job) -> bool:
        return engine.takes(job.sequence_len) and engine.has_room(job.tokens)


class EagerBinding:
    """At once: the job waits in the engine's own queue (what most systems do)."""

    name = "eager"

    def drawn(self, engines: EngineSet) -> list[EngineSnapshot]:
        return engines.draw()

    def fits(self, engine: EngineSnapshot, job: Job) -> bool:
        return engine.takes(job.sequence_len)
