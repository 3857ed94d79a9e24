"""Autoscaling through Serve: engines publish, the policy decides, routers wake the first engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.fleet.scaling import EngineUse, FleetDemand, ScalingSettings, wanted_engines

LOOK_BACK_S = 3.0
"""Serve averages what was published over so long."""
PUBLISH_S = 1.0
PUBLISH_ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(PUBLISH_S),
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(PUBLISH_S),
}
"""For the replicas' processes; Serve's own default is ten seconds."""


def published(use: EngineUse, pool_tokens: int, demand: FleetDemand) -> dict[str, float]:
    """What one engine tells Serve: its own use, and the whole fleet's demand as it last heard."""
    return {
        "outstanding": use.outstanding,
        "lanes": use.lanes,
        "pool_tokens": float(pool_tokens),
        "queued": float(demand.queued),
        "queued_tokens": float(demand.tokens),
        "ttft_s": demand.ttft_s,
    }


class EnginePolicy:
    """Serve's autoscaling policy of the engines' deployment. Runs in Serve's controller; delays and
    limits are Serve's, from the same settings."""

    def __init__(self, **settings: Any) -> None:
        self._settings = ScalingSettings(**settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: ray.serve.config.AutoscalingContext."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        outstanding, lanes = metrics.get("outstanding", {}), metrics.get("lanes", {})
        if not outstanding:
            # Nobody has said anything yet: an engine that loads, or none at all.
            waiting = context.total_queued_requests or 0
            return max(context.target_num_replicas, int(waiting > 0)), {}
        uses = [EngineUse(outstanding[one], lanes.get(one, 0.0)) for one in outstanding]
        demand = FleetDemand(
            round(_most(metrics, "queued")),
            round(_most(metrics, "queued_tokens")),
            _most(metrics, "ttft_s"),
        )
        pool_tokens = _most(metrics, "pool_tokens")
        return wanted_engines(self._settings, uses, demand, pool_tokens), {}


def _most(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    """Every engine tells the same of the fleet; the newest among them knows the most."""
    values: Iterable[float] = metrics.get(name, {}).values()
    return max(values, default=0.0)
