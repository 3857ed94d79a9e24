"""What an operator decides about metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """router_port, engine_port: where each is scraped, the next free one if it is taken, 0 any; on
    the interface of the hop. log_format, log_level: see logs.configure."""

    router_port: int = 9464
    engine_port: int = 0
    log_format: str = "text"
    log_level: str = "info"
