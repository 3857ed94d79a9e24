"""What a load test sends: a schedule that every worker derives for itself from one description."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from cluster.core.errors import ConfigError
from cluster.sim.traces import TraceOptions
from cluster.sim.workload import Lengths, SimRequest
from loadtests.arrivals import Arrivals, Closed, Sizes, parse_arrivals, timed_requests


class PlannedRequest(NamedTuple):
    """number: place in the schedule. at_s: since the start. kind: "request", "chat" (a turn of a
    session) or "long". input_length: tokens that this turn adds. session: -1 without one.
    hash_ids: see SimRequest."""

    number: int
    at_s: float
    kind: str
    input_length: int
    output_length: int
    tenant: int = 0
    session: int = -1
    turn: int = 0
    hash_ids: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, reproducible from these values alone.

    arrivals: see loadtests.arrivals. requests: of the arrival process, at most. *_mean, *_cv:
    lognormal token counts. rate_scale, length_scale, max_input, max_output: for traces, where
    max_input and max_output also cap drawn lengths. warmup_s: arrivals up to then are sent but not
    counted. turns, think_s: each arrival is a chat session whose next turn is due think_s later.
    long_every_s, long_prompt: a prompt of so many tokens comes in among the others every so often,
    long_count times, or (0) as long as others arrive; the first after long_first_s, or (0) as long
    as between two.
    tenants, tenant_skew: tenant k gets a share proportional to k ** -skew. priorities: each request
    has one of 0 to priorities - 1, drawn evenly.
    """

    arrivals: str = "poisson:2"
    requests: int = 100
    prompt_mean: float = 128.0
    prompt_cv: float = 0.6
    output_mean: float = 64.0
    output_cv: float = 0.6
    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_input: int = 1024
    max_output: int = 512
    warmup_s: float = 0.0
    turns: int = 1
    think_s: float = 2.0
    long_every_s: float = 0.0
    long_first_s: float = 0.0
    long_count: int = 0
    long_prompt: int = 1024
    long_output: int = 8
    tenants: int = 1
    tenant_skew: float = 1.0
    priorities: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        parse_arrivals(self.arrivals)
        _at_least(self, 1, "requests", "max_input", "max_output", "turns", "tenants", "priorities")
        _at_least(self, 1, "long_prompt", "long_output")
        _at_least(self, 0, "long_count", "warmup_s", "think_s", "tenant_skew")
        _at_least(self, 0, "long_every_s", "long_first_s")
        if self.closed_users and (self.turns > 1 or self.long_every_s):
            raise ConfigError("a closed loop has no schedule for turns or long prompts")

    @property
    def closed_users(self) -> int:
        """0 for an open loop."""
        arrivals: Arrivals = parse_arrivals(self.arrivals)
        return arrivals.users if isinstance(arrivals, Closed) else 0

    def schedule(self) -> list[PlannedRequest]:
        """All requests in order of arrival."""
        timed = timed_requests(parse_arrivals(self.arrivals), self._sizes())
        tenant_of = _tenant_draw(self.tenants, self.tenant_skew, self.seed)
        priorities = random.Random(f"priorities {self.seed}")
        rows: list[PlannedRequest] = []
        for number, request in enumerate(timed):
            priority = priorities.randrange(self.priorities)
            turns = self._turns(number, request, tenant_of())
            rows += [turn._replace(priority=priority) for turn in turns]
        rows += self._long_prompts(max(row.at_s for row in rows))
        rows.sort(key=lambda row: row.at_s)
        return [row._replace(number=number) for number, row in enumerate(rows)]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Scenario:
        """Raises ConfigError for a field that there is not."""
        known = {f.name for f in fields(Scenario)}
        if unknown := values.keys() - known:
            raise ConfigError(f"a scenario has no field {min(unknown)!r}")
        return Scenario(**values)

    def _sizes(self) -> Sizes:
        return Sizes(
            self.requests,
            Lengths(self.prompt_mean, self.prompt_cv),
            Lengths(self.output_mean, self.output_cv),
            TraceOptions(
                rate_scale=self.rate_scale,
                length_scale=self.length_scale,
                max_input=self.max_input,
                max_output=self.max_output,
            ),
            self.seed,
        )

    def _turns(self, number: int, request: SimRequest, tenant: int) -> list[PlannedRequest]:
        session = number if self.turns > 1 else -1
        return [
            PlannedRequest(
                number=0,
                at_s=request.arrival_s + turn * self.think_s,
                kind="chat" if self.turns > 1 else "request",
                input_length=min(request.input_length, self.max_input),
                output_length=min(request.output_length, self.max_output),
                tenant=tenant,
                session=session,
                turn=turn,
                hash_ids=request.hash_ids,
            )
            for turn in range(self.turns)
        ]

    def _long_prompts(self, end_s: float) -> list[PlannedRequest]:
        if not self.long_every_s:
            return []
        first = self.long_first_s or self.long_every_s
        left_s = max(0.0, end_s - first)
        count = self.long_count or math.floor(left_s / self.long_every_s) + (first <= end_s)
        size = (self.long_prompt, self.long_output)
        return [
            PlannedRequest(0, first + k * self.long_every_s, "long", *size) for k in range(count)
        ]


def shard_of(schedule: Sequence[PlannedRequest], shard: int, shards: int) -> list[PlannedRequest]:
    """Every request is in exactly one shard; the turns of a session stay together."""
    if not 0 <= shard < shards:
        raise ConfigError(f"shard must be below {shards}, got {shard}")
    return [
        row
        for row in schedule
        if (row.number if row.session < 0 else row.session) % shards == shard
    ]


def _tenant_draw(tenants: int, skew: float, seed: int) -> Callable[[], int]:
    """A function that draws tenant numbers; a generator of its own leaves the lengths alone."""
    weights = [(k + 1) ** -skew for k in range(tenants)]
    draws = random.Random(f"tenants {seed}")
    return lambda: draws.choices(range(tenants), weights)[0]


def _at_least(scenario: Scenario, least: float, *names: str) -> None:
    for name in names:
        value = getattr(scenario, name)
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name} must be at least {least}, got {value!r}")
