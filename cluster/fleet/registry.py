"""Which engines exist and what waits for them: leases that engines and routers renew, kept by the
coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.modelinfo import ModelInfo
from cluster.fleet.scaling import FleetDemand


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Where an engine listens for routers. epoch: larger after each restart of the same id."""

    engine_id: str
    host: str
    port: int
    epoch: int
    model: ModelInfo | None = None

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)


class Directory(NamedTuple):
    """model: what the fleet serves, or served when it last had an engine."""

    engines: list[EngineRecord]
    model: ModelInfo | None

    @property
    def addresses(self) -> set[tuple[str, int]]:
        return {record.address for record in self.engines}


class EngineRegistry:
    """Engines that renewed their lease within the last `lease_s` seconds.

    Holds nothing that the engines do not tell again within a second, so a coordinator that
    restarts empty is whole again at once.
    """

    def __init__(self, lease_s: float = 5.0) -> None:
        self._lease_s = lease_s
        self._records: dict[str, tuple[EngineRecord, float]] = {}
        self.model: ModelInfo | None = None
        """Of the engine that joined last."""

    def renew(self, record: EngineRecord, now: float) -> bool:
        """Register or renew. False (and ignored) if a newer epoch of that id is known."""
        known = self._records.get(record.engine_id)
        if known is not None and known[0].epoch > record.epoch:
            return False
        if record.model is not None and (known is None or known[0].epoch < record.epoch):
            self.model = record.model
        self._records[record.engine_id] = (record, now + self._lease_s)
        return True

    def remove(self, engine_id: str, epoch: int) -> None:
        """An engine says goodbye; a later epoch of the same id stays."""
        known = self._records.get(engine_id)
        if known is not None and known[0].epoch <= epoch:
            del self._records[engine_id]

    def alive(self, now: float) -> list[EngineRecord]:
        """Engines with a valid lease, by id."""
        self._records = {k: v for k, v in self._records.items() if v[1] > now}
        return [record for _, (record, _) in sorted(self._records.items())]

    def directory(self, now: float) -> Directory:
        return Directory(self.alive(now), self.model)


@dataclass(slots=True)
class DemandBoard:
    """What waits at each router that was heard of within the last `lease_s` seconds."""

    lease_s: float = 5.0
    _told: dict[str, tuple[FleetDemand, float]] = field(default_factory=dict)

    def tell(self, router_id: str, demand: FleetDemand, now: float) -> None:
        self._told[router_id] = (demand, now + self.lease_s)

    def total(self, now: float) -> FleetDemand:
        self._told = {k: v for k, v in self._told.items() if v[1] > now}
        total = FleetDemand()
        for demand, _ in self._told.values():
            total = total.plus(demand)
        return total
