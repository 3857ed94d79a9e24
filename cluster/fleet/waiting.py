"""Jobs that no engine has room for: they wait at the router, bounded and fair."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.core.queues.fair import Turns
from cluster.fleet.job import Job

QUANTUM = 2048
"""Tokens per tenant and turn."""


@dataclass(slots=True)
class _Line:
    """One tenant's jobs of one priority, first come first served, those that ran before first."""

    jobs: OrderedDict[int, Job] = field(default_factory=OrderedDict)

    @property
    def head(self) -> Job:
        return next(iter(self.jobs.values()))


class _Level:
    """All tenants of one priority; they take turns, counted in tokens."""

    def __init__(self) -> None:
        self.turns = Turns(QUANTUM)
        self.lines: dict[str, _Line] = {}

    def next(self) -> Job:
        costs = {tenant: line.head.tokens for tenant, line in self.lines.items()}
        return self.lines[self.turns.next(costs)].head


class WaitingJobs:
    """The larger priority first; within one, tenants in turns; within a tenant, by arrival."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        """Negated priorities, sorted."""
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._head: Job | None = None
        """Whose turn it is, once asked for: it keeps its turn until it leaves or is outranked."""
        self._tenant_tokens: dict[str, int] = {}
        self._tenant_jobs: dict[str, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """In the order in which they came."""
        return iter(self._jobs.values())

    def __contains__(self, job: Job) -> bool:
        return id(job) in self._jobs

    def tokens_of(self, tenant: str) -> int:
        return self._tenant_tokens.get(tenant, 0)

    def jobs_of(self, tenant: str) -> int:
        return self._tenant_jobs.get(tenant, 0)

    def tokens_from(self, priority: int) -> int:
        """Tokens of jobs of this priority and above: what stands before a newcomer of it."""
        if len(self._order) <= 1 and (not self._order or -self._order[0] >= priority):
            return self.tokens
        return sum(
            job.tokens
            for negated in self._order
            if -negated >= priority
            for line in self._levels[-negated].lines.values()
            for job in line.jobs.values()
        )

    def push(self, job: Job) -> None:
        """A newcomer, behind its tenant's others."""
        self._line(job).jobs[id(job)] = job
        self._count(job, 1)
        if self._head is not None and job.priority > self._head.priority:
            self._head = None

    def push_returning(self, job: Job) -> None:
        """One that was placed before, ahead of its tenant's newcomers."""
        line = self._line(job)
        line.jobs[id(job)] = job
        line.jobs.move_to_end(id(job), last=False)
        self._count(job, 1)
        self._head = None

    def peek(self) -> Job | None:
        """Whose turn it is."""
        if self._head is None and self._order:
            self._head = self._levels[-self._order[0]].next()
        return self._head

    def take(self, job: Job) -> None:
        """It goes to an engine, and its tenant pays for it."""
        level = self._levels[job.priority]
        level.turns.charge(job.tenant, job.tokens)
        self.remove(job)

    def remove(self, job: Job) -> None:
        """It leaves without having been placed."""
        if job is self._head:
            self._head = None
        level = self._levels[job.priority]
        line = level.lines[job.tenant]
        del line.jobs[id(job)]
        self._count(job, -1)
        if line.jobs:
            return
        del level.lines[job.tenant]
        level.turns.leave(job.tenant)
        if not level.lines:
            del self._levels[job.priority]
            self._order.remove(-job.priority)

    def _line(self, job: Job) -> _Line:
        level = self._levels.get(job.priority)
        if level is None:
            level = self._levels[job.priority] = _Level()
            insort(self._order, -job.priority)
        line = level.lines.get(job.tenant)
        if line is None:
            line = level.lines[job.tenant] = _Line()
            level.turns.join(job.tenant)
        return line

    def _count(self, job: Job, sign: int) -> None:
        if sign > 0:
            self._jobs[id(job)] = job
        else:
            del self._jobs[id(job)]
        self.tokens += sign * job.tokens
        for counts, amount in ((self._tenant_tokens, job.tokens), (self._tenant_jobs, 1)):
            left = counts.get(job.tenant, 0) + sign * amount
            if left:
                counts[job.tenant] = left
            else:
                counts.pop(job.tenant, None)
