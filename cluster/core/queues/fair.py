"""Fair shares between tenants."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from cluster.core.errors import ConfigError
from cluster.core.ids import SequenceId
from cluster.core.sequence import Sequence


class Turns:
    """Whose turn it is: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995).

    A tenant whose balance covers its next item is served; otherwise it gets `quantum` and the
    turn goes on. Whole rounds in which nobody can be served are granted at once.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._order: deque[str] = deque()
        self._balance: dict[str, float] = {}

    def copy(self) -> Turns:
        twin = Turns(self._quantum)
        twin._order = deque(self._order)
        twin._balance = dict(self._balance)
        return twin

    def join(self, tenant: str) -> None:
        """Nothing is saved up while idle; what was taken beyond the share is still owed."""
        self._order.append(tenant)
        self._balance[tenant] = min(0.0, self._balance.get(tenant, 0.0))

    def leave(self, tenant: str) -> None:
        self._order.remove(tenant)
        if self._balance[tenant] >= 0.0:
            del self._balance[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self._balance[tenant] = self._balance.get(tenant, 0.0) - tokens

    def next(self, costs: Mapping[str, int]) -> str:
        """The tenant to be served; costs: of the next item of each tenant that has joined."""
        balance, quantum = self._balance, self._quantum
        rounds = min(math.ceil((costs[t] - balance[t]) / quantum) for t in self._order)
        if rounds > 1:
            for tenant in self._order:
                balance[tenant] += (rounds - 1) * quantum
        while balance[self._order[0]] < costs[self._order[0]]:
            balance[self._order[0]] += quantum
            self._order.rotate(-1)
        return self._order[0]


class FairQueue:
    """Tenants take turns, counted in tokens: what a sequence has to compute is charged when it
    comes in, what it emits as it is emitted. Within a tenant, first come, first served.

    Returning sequences go before all newcomers, by arrival; they were charged when they came in.
    """

    name = "fair"

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise ConfigError(f"quantum must be at least 1 token, got {quantum}")
        self._returning: list[Sequence] = []
        self._lines: dict[str, OrderedDict[SequenceId, Sequence]] = {}
        self._turns = Turns(quantum)
        self._tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        return self._tokens

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returning
        turns = self._turns.copy()
        lines = {tenant: deque(line.values()) for tenant, line in self._lines.items()}
        costs = {tenant: line[0].total for tenant, line in lines.items()}
        while costs:
            tenant = turns.next(costs)
            sequence = lines[tenant].popleft()
            turns.charge(tenant, sequence.total)
            yield sequence
            if lines[tenant]:
                costs[tenant] = lines[tenant][0].total
            else:
                del costs[tenant]
                turns.leave(tenant)

    def push(self, sequence: Sequence) -> None:
        line = self._lines.get(sequence.tenant)
        if line is None:
            line = self._lines[sequence.tenant] = OrderedDict()
            self._turns.join(sequence.tenant)
        line[sequence.seq_id] = sequence
        self._count_in(sequence)

    def push_returning(self, sequence: Sequence) -> None:
        insort(self._returning, sequence, key=lambda s: s.rank)
        self._count_in(sequence)

    def peek(self) -> Sequence | None:
        return next(iter(self), None)

    def take(self, sequence: Sequence) -> None:
        if not self._returning or sequence not in self._returning:
            # Grants what the turns up to this one grant; the charge is its own tenant's.
            self._turns.next({t: next(iter(q.values())).total for t, q in self._lines.items()})
            self._turns.charge(sequence.tenant, sequence.total)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._tokens -= sequence.total
        self._count -= 1
        line = self._lines.get(sequence.tenant)
        if line is None or line.pop(sequence.seq_id, None) is None:
            self._returning.remove(sequence)
        elif not line:
            del self._lines[sequence.tenant]
            self._turns.leave(sequence.tenant)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def charge(self, sequence: Sequence, tokens: int) -> None:
        self._turns.charge(sequence.tenant, tokens)

    def _count_in(self, sequence: Sequence) -> None:
        self._tokens += sequence.total
        self._count += 1
