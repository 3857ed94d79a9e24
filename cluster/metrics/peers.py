"""The routers of an application, as they tell of themselves: leases, kept by the coordinator."""

from __future__ import annotations

from cluster.metrics.board import RouterSummary


class RouterRegistry:
    """Routers heard of within the last `lease_s` seconds. Holds nothing that they do not tell again
    within a second."""

    def __init__(self, lease_s: float = 5.0) -> None:
        self._lease_s = lease_s
        self._told: dict[str, tuple[RouterSummary, float]] = {}

    def meet(self, own: RouterSummary, now: float) -> list[RouterSummary]:
        """Take in what one tells; all the others, by id."""
        self._told[own.router_id] = (own, now + self._lease_s)
        self._told = {k: v for k, v in self._told.items() if v[1] > now}
        return [told for name, (told, _) in sorted(self._told.items()) if name != own.router_id]
