"""What a router's decision costs, with few engines and with many: `headway bench fleet`."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from dataclasses import dataclass

from cluster.core.errors import ConfigError, Overloaded
from cluster.core.load import EngineLoad
from cluster.fleet.dispatch import Fleet, FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.job import Job
from cluster.fleet.placements.registry import make_placement
from cluster.fleet.snapshot import EngineCapacity, EngineSnapshot

SIZES = (4, 64, 1000)
CAPACITY = EngineCapacity(32_768, 16, 8192, 256, 2048)
PROMPT_TOKENS = 512
SESSIONS = 5000


class _Sink:
    """Carries nothing out: only the decision is timed."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        self.sent += 1
        return self.sent

    def take_back(self, job: Job) -> None:
        """Nobody moves here."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU time. offer: per request. frame: per engine frame."""

    placement: str
    engines: int
    load: str
    offer_us: float
    frame_us: float


def measure(placement: str, engines: int, room: int, offers: int) -> Cost:
    """room: blocks that every engine has left; 0 for a fleet that is full."""
    fleet = Fleet(
        _Sink(),
        make_placement(placement),
        FleetSettings(gate=GateSettings(max_queued=64)),
    )
    chooser = random.Random(1)
    for number in range(engines):
        fleet.joined(EngineSnapshot(f"engine-{number:04d}", CAPACITY), 0.0)
    prompts = [tuple(chooser.randrange(50_000) for _ in range(PROMPT_TOKENS)) for _ in range(64)]
    jobs = [
        Job(
            PROMPT_TOKENS,
            PROMPT_TOKENS + 256,
            tenant=f"tenant-{n % 50}",
            session=f"session-{n % SESSIONS}",
            prompt_ids=prompts[n % len(prompts)],
        )
        for n in range(offers)
    ]
    frames, offered = [], []
    for index, job in enumerate(jobs):
        if index % 4 == 0:
            name = f"engine-{chooser.randrange(engines):04d}"
            before = time.thread_time()
            fleet.heard(name, _load(room), 1 << 60, (), index * 1e-5)
            frames.append(time.thread_time() - before)
        before = time.thread_time()
        with contextlib.suppress(Overloaded):
            fleet.offer(job, index * 1e-5)
        offered.append(time.thread_time() - before)
    return Cost(
        placement,
        engines,
        "room" if room else "full",
        1e6 * statistics.mean(offered),
        1e6 * statistics.mean(frames),
    )


def _load(room: int) -> EngineLoad:
    running = 100 if room else CAPACITY.max_num_seqs
    free = room + 200 if room else 0
    return EngineLoad(1, free, CAPACITY.num_blocks, running, 0, 0, 0.0, 0, 0, 0, room, 0.02, 0, ())


def run(offers: int) -> None:
    """Prints a table. Raises ConfigError without a request to measure."""
    if offers < 1:
        raise ConfigError(f"offers must be at least 1, got {offers}")
    print(f"{'placement':<18} {'engines':>7} {'fleet':>5} {'us/request':>11} {'us/frame':>9}")
    for placement in ("least-outstanding", "power-of-two", "prefix-affinity", "session-affinity"):
        for engines in SIZES:
            for room in (2000, 0):
                cost = measure(placement, engines, room, offers)
                print(
                    f"{cost.placement:<18} {cost.engines:>7} {cost.load:>5} "
                    f"{cost.offer_us:>11.1f} {cost.frame_us:>9.1f}"
                )
