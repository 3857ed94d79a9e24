"""Who may wait: admission at the edge, before anything is spent on a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.errors import ConfigError, Overloaded
from cluster.core.outcome import Refusal
from cluster.core.request import objective_problem
from cluster.fleet.job import Job
from cluster.fleet.waiting import WaitingJobs

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_SAFETY = 0.7
"""Share of the objective that the expected time may take: expectations are off by a fifth or so,
and who is let in and late has cost others their place."""


@dataclass(frozen=True, slots=True)
class GateSettings:
    """max_queued_tokens, max_queued: of one tenant at one router (prompt tokens, requests); with 0
    requests nobody waits: who finds no room is refused.
    ttft_objective_s: of requests that name none; None refuses nobody for being slow.
    queue_timeout_s: nobody waits longer for an engine.
    """

    max_queued_tokens: int = 1 << 20
    max_queued: int = 1024
    ttft_objective_s: float | None = None
    queue_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_queued_tokens", "max_queued"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.queue_timeout_s > 0:
            raise ConfigError(f"queue_timeout_s must be above 0, got {self.queue_timeout_s!r}")
        objective = self.ttft_objective_s
        if objective is not None and (problem := objective_problem(objective)):
            raise ConfigError(f"ttft_objective_s {problem}")


class DrainRate:
    """Tokens per second that leave the queue for engines: over the last `most` jobs, and no longer
    than `window_s`, so that it follows quick fleets quickly and slow ones at all."""

    def __init__(self, window_s: float = 10.0, most: int = 64) -> None:
        self._window_s = window_s
        self._most = most
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last = 0.0

    def add(self, now: float, tokens: int) -> None:
        self._events.append((now, tokens))
        self._sum += tokens
        if len(self._events) > self._most:
            self._sum -= self._events.popleft()[1]
        self._expire(now)

    def per_second(self, now: float) -> float:
        """The last rate known while nothing leaves; 0 before anything has."""
        self._expire(now)
        if len(self._events) >= 2:
            span = max(now - self._events[0][0], 1e-3)
            self._last = self._sum / span
        return self._last

    def _expire(self, now: float) -> None:
        while self._events and self._events[0][0] < now - self._window_s:
            self._sum -= self._events.popleft()[1]


class Gate:
    """Refuses at once whom it could not serve in time, and says when to come again."""

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        self._drain = DrainRate()

    def check(
        self, job: Job, waiting: WaitingJobs, prefill_s: Callable[[Job], float], now: float
    ) -> None:
        """Let a newcomer wait, or raise Overloaded. prefill_s: seconds to its first token once it
        is placed; asked for only where there is an objective."""
        settings, tenant = self.settings, job.tenant
        wait_s = self.wait_s(job, waiting, now)
        queued, tokens = waiting.jobs_of(tenant), waiting.tokens_of(tenant)
        if queued >= settings.max_queued:
            raise _refusal(
                Refusal.QUEUED_REQUESTS,
                f"{queued} requests of this tenant are waiting, the limit is {settings.max_queued}",
                wait_s,
            )
        if queued and tokens + job.tokens > settings.max_queued_tokens:
            raise _refusal(
                Refusal.QUEUED_TOKENS,
                f"{tokens} prompt tokens of this tenant are waiting and this request has "
                f"{job.tokens}, the limit is {settings.max_queued_tokens}",
                wait_s,
            )
        objective = job.ttft_objective_s or settings.ttft_objective_s
        if objective is None:
            return
        expected = wait_s + prefill_s(job)
        if expected > _SAFETY * objective:
            raise _refusal(
                Refusal.OBJECTIVE,
                f"the first token would come after about {expected:.1f} s, the objective is "
                f"{objective:g} s",
                expected - _SAFETY * objective,
            )

    def wait_s(self, job: Job, waiting: WaitingJobs, now: float) -> float:
        """About how long a newcomer would wait for an engine; 0 while nothing is known."""
        ahead = waiting.tokens_from(job.priority)
        if not ahead:
            return 0.0
        rate = self._drain.per_second(now)
        return ahead / rate if rate > 0 else 0.0

    def patience_s(self, job: Job) -> float:
        """How long a job may wait at the router."""
        objective = job.ttft_objective_s or self.settings.ttft_objective_s
        if objective is None or job.begun:
            return self.settings.queue_timeout_s
        return min(objective, self.settings.queue_timeout_s)

    def left(self, job: Job, now: float) -> None:
        """A job has gone to an engine."""
        self._drain.add(now, job.tokens)


def _refusal(reason: Refusal, text: str, retry_after_s: float) -> Overloaded:
    return Overloaded(
        f"{text}; try again later",
        retry_after_s=min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S),
        reason=reason,
    )
