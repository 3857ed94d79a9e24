"""Which engines exist: leases that engines renew, kept by the coordinator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Where an engine listens for routers. epoch: larger after each restart of the same id."""

    engine_id: str
    host: str
    port: int
    epoch: int

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)


class EngineRegistry:
    """Engines that renewed their lease within the last `lease_s` seconds.

    Holds nothing that the engines do not tell again within a second, so a coordinator that
    restarts empty is whole again at once.
    """

    def __init__(self, lease_s: float = 5.0) -> None:
        self._lease_s = lease_s
        self._records: dict[str, tuple[EngineRecord, float]] = {}

    def renew(self, record: EngineRecord, now: float) -> bool:
        """Register or renew. False (and ignored) if a newer epoch of that id is known."""
        known = self._records.get(record.engine_id)
        if known is not None and known[0].epoch > record.epoch:
            return False
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
