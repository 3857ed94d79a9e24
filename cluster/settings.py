"""Everything an operator sets for one application, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.config import WorkerConfig, check_watermark
from cluster.core.errors import ConfigError
from cluster.gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """worker: per engine. gateway: per router. secret: shared by routers and engines.
    engines, routers: how many of each. gpus_per_engine: 0 serves on CPU. hop_host: interface on
    which engines take in routers; None is the node's address, as Ray knows it.
    """

    worker: WorkerConfig
    gateway: GatewayConfig
    secret: str
    engines: int = 1
    routers: int = 1
    gpus_per_engine: int = 0
    watermark: float = 0.02
    hop_host: str | None = None

    def __post_init__(self) -> None:
        for name in ("engines", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_watermark(self.watermark)
        if not self.secret:
            raise ConfigError("secret must not be empty")
