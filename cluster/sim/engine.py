"""One simulated engine: the real EngineCore, and a cost model where the GPU would be."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from cluster.core.errors import InvariantViolation
from cluster.core.ids import TokenId
from cluster.core.plan import StepPlan, StepResult
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.engine.core import EngineCore, StepReport, StreamFailure, StreamKey
from cluster.sim.coast import CoastingCore, Stretch
from cluster.sim.costs.base import StepCost
from cluster.sim.workload import SimRequest

SYNTHETIC_TOKEN: TokenId = 1
"""What every simulated row says. No stop token: outputs end where the trace says."""
CONNECTION = 0
"""A simulation has one router."""
HASH_BLOCK = 512
"""Prompt tokens that one hash id of a trace stands for."""
LEAST_WAIT_S = 1e-6
_samples = itemgetter(3)
"""Row.samples, without an attribute look-up in Python."""
_ID_MASK = (1 << 31) - 1


def engine_request(number: int, asked: SimRequest) -> EngineRequest:
    """The request as the engine gets it. Prompts share ids where their trace says so, and
    nowhere else: a prefix cache must see no hit that reality would not have given."""
    length = asked.input_length
    if not asked.hash_ids:
        prompt: tuple[TokenId, ...] = (number & _ID_MASK,) * length
    else:
        ids = [hash_id & _ID_MASK for hash_id in asked.hash_ids for _ in range(HASH_BLOCK)]
        ids += [number & _ID_MASK] * (length - len(ids))
        prompt = tuple(ids[:length])
    sampling = _sampling(asked.output_length)
    return EngineRequest(prompt, sampling, priority=asked.priority, tenant=asked.tenant)


@lru_cache(maxsize=1 << 16)
def _sampling(output_length: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_length, temperature=0.0)


class Slowdown(NamedTuple):
    """From at_s on every step takes `factor` times as long: heat, a noisy neighbour."""

    at_s: float
    factor: float


class SimEngine:
    """Steps an EngineCore in virtual time. The executor's part is a constant token per sampling row
    and the time that the cost model names; no context is held."""

    __slots__ = (
        "_core",
        "_cost",
        "_landing_s",
        "_plan",
        "_slowdown",
        "_started_s",
        "busy_s",
        "name",
    )

    def __init__(
        self, name: str, core: EngineCore, cost: StepCost, slowdown: Slowdown | None = None
    ) -> None:
        self.name = name
        self.busy_s = 0.0
        self._core = core
        self._cost = cost
        self._slowdown = slowdown
        self._plan: StepPlan | None = None
        self._started_s = 0.0
        self._landing_s: float | None = None

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def stepping(self) -> bool:
        return self._plan is not None or self._landing_s is not None

    @property
    def plan(self) -> StepPlan | None:
        """The step under way."""
        return self._plan

    @property
    def started_s(self) -> float:
        """When the newest step began."""
        return self._started_s

    def submit(self, stream: int, request: EngineRequest, now: float) -> StreamFailure | None:
        return self._core.submit(StreamKey(CONNECTION, stream), request, now)

    def begin(self, now: float) -> float | None:
        """Start a step; the time at which it will be done, or None if nothing can run."""
        if self._landing_s is not None:
            return self._landing_s
        # An engine without work is not asked: its check of the books costs more than a step.
        if len(self._core.scheduler) == 0:
            return None
        plan = self._core.begin_step(now)
        if plan is None:
            return None
        seconds = self._cost.seconds(plan)
        if self._slowdown is not None and now >= self._slowdown.at_s:
            seconds *= self._slowdown.factor
        self._plan = plan
        self._started_s = now
        self.busy_s += seconds
        return now + seconds

    def wake_s(self, now: float) -> float | None:
        """When a policy that waits wants to be asked again; None when only an arrival helps."""
        scheduler = self._core.scheduler
        wake = scheduler.next_wake_s
        if wake is None or len(scheduler) == 0:
            return None
        # Time must go on even if the policy's own sum rounds to the present.
        return max(wake, now + LEAST_WAIT_S)

    def close_arrivals(self) -> None:
        """No request will come any more."""
        self._core.scheduler.close_arrivals()

    def coast(self, now: float, until: float) -> Stretch | None:
        """Take at once all quiet steps that begin at `now` or later and are done before `until`.

        A quiet step that will be under way at `until` is begun as well; land() ends it.
        """
        core = self._core
        if self._landing_s is not None or not isinstance(core, CoastingCore):
            return None
        steps, sequences, positions = core.quiet(SYNTHETIC_TOKEN)
        seconds_of, slowdown = self._cost.decode_seconds, self._slowdown
        ends: list[float] = []
        for _ in range(steps):
            seconds = seconds_of(sequences, positions)
            if slowdown is not None and now >= slowdown.at_s:
                seconds *= slowdown.factor
            self.busy_s += seconds
            end = now + seconds
            if end >= until:
                self._landing_s = end
                break
            ends.append(end)
            positions += sequences
            now = end
        return core.coast(ends, SYNTHETIC_TOKEN) if ends else None

    def land(self) -> Stretch | None:
        """End the quiet step that is under way, if one is."""
        landing_s, core = self._landing_s, self._core
        if landing_s is None or not isinstance(core, CoastingCore):
            return None
        self._landing_s = None
        return core.coast([landing_s], SYNTHETIC_TOKEN)

    def finish(self, now: float) -> StepReport:
        """The step under way is done."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise InvariantViolation(f"{self.name}: no step is under way")
        sampling = sum(map(_samples, plan.rows))
        result = StepResult(plan.step, [SYNTHETIC_TOKEN] * sampling, now - self._started_s)
        return self._core.complete_step(result, now)
