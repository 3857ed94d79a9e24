"""The whole system under a real trace, scaled to the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.bench.experiments import LIMITS
from cluster.core.errors import HeadwayError
from loadtests.job import Job
from loadtests.outcome import Outcome, judge
from loadtests.runner import run_load
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec

TRACE = Scenario(
    arrivals="trace:azure-conv",
    requests=200,
    # About 140 tokens in and 26 out on average, where the recorded service had eight times that.
    length_scale=0.125,
    max_input=512,
    max_output=128,
)
LOAD_SHARE = 0.5
"""Of the measured capacity: a queue that has bursts needs room."""
CALIBRATION_USERS = 12
CALIBRATION_REQUESTS = 36


def calibration_load(trace: Scenario) -> Scenario:
    """A closed loop of the trace's own lengths: what the machine can do at the most."""
    schedule = trace.schedule()
    return Scenario(
        arrivals=f"closed:{CALIBRATION_USERS}",
        requests=CALIBRATION_REQUESTS,
        prompt_mean=max(1.0, sum(r.input_length for r in schedule) / len(schedule)),
        output_mean=max(1.0, sum(r.output_length for r in schedule) / len(schedule)),
        max_input=trace.max_input,
        max_output=trace.max_output,
    )


def scaled(trace: Scenario, capacity_rps: float, share: float = LOAD_SHARE) -> Scenario:
    """The trace at such a pace that it asks for `share` of the capacity on average."""
    last = trace.schedule()[-1].at_s
    recorded_rps = trace.requests / last if last > 0 else capacity_rps
    return replace(trace, rate_scale=share * capacity_rps / recorded_rps)


def run_quick(target: TargetSpec, requests: int, slo: str, say: Callable[[str], None]) -> Outcome:
    """Calibrate, then replay. Raises HeadwayError when the server answers nothing."""
    trace = replace(TRACE, requests=requests)
    measured = run_load(Job(calibration_load(trace), target))
    span = measured.span_s()
    if not measured.counts.measured or not span:
        raise HeadwayError(f"the server answered nothing: {measured.errors}")
    capacity = measured.counts.measured / span
    scenario = scaled(trace, capacity)
    say(
        f"capacity about {capacity:.2f} requests/s; replaying the trace "
        f"{scenario.rate_scale:.2f} times as fast as recorded"
    )
    job = Job(replace(scenario, warmup_s=2.0), target)
    return judge(job, run_load(job), slo, LIMITS)
