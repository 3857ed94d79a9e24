"""Everything an operator sets for one application, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.config import WorkerConfig, check_watermark
from cluster.core.errors import ConfigError
from cluster.core.policies import PolicyChoice
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.placements.registry import make_placement
from cluster.fleet.scaling import ScalingSettings
from cluster.gateway.config import GatewayConfig
from cluster.hop.service import DEFAULT_POLICIES
from cluster.observing import ObserveSettings


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """worker: per engine. gateway: per router. secret: shared by routers and engines.
    engines, routers: how many of each. gpus_per_rank: 0 serves on CPU; an engine has as many ranks
    as its tensor_parallel_size. hop_host: interface on which engines take in routers; None is the
    node's address, as Ray knows it. hop_port, step_log_folder: see EngineOptions. policies: of each
    engine's scheduler. placement, fleet: of each router (fleet.placements, fleet.dispatch).
    scaling: None keeps `engines` engines. engine_drain_s, router_drain_s: how long a replica that
    is replaced or scaled in may go on with what it has. routers_per_node: at most so many on one
    node; 0 does not look at nodes. generation: another one replaces all replicas, whatever else is
    the same. observe: metrics and logs of all.
    """

    worker: WorkerConfig
    gateway: GatewayConfig
    secret: str
    engines: int = 1
    routers: int = 1
    gpus_per_rank: int = 0
    watermark: float = 0.02
    hop_host: str | None = None
    hop_port: int = 0
    policies: PolicyChoice = DEFAULT_POLICIES
    step_log_folder: str | None = None
    placement: str = "least-outstanding"
    fleet: FleetSettings = field(default_factory=FleetSettings)
    scaling: ScalingSettings | None = None
    engine_drain_s: float = 60.0
    router_drain_s: float = 300.0
    routers_per_node: int = 0
    generation: str = ""
    observe: ObserveSettings = field(default_factory=ObserveSettings)

    @property
    def may_be_without_engine(self) -> bool:
        """Whether the application serves while no engine runs: the first request starts one."""
        return self.scaling is not None and self.scaling.min_engines == 0

    def __post_init__(self) -> None:
        for name in ("engines", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_watermark(self.watermark)
        make_placement(self.placement)
        self.policies.build(
            batch_size=self.worker.max_num_seqs,
            block_size=self.worker.block_size,
            max_tokens=self.worker.max_num_batched_tokens,
        )
        if not self.secret:
            raise ConfigError("secret must not be empty")
