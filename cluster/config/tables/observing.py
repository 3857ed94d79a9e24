"""What an operator sees of routers and engines while they run."""

from __future__ import annotations

from functools import partial

from cluster.config.option import INTEGER, TEXT, Limits, Option
from cluster.logs import FORMATS, LEVELS
from cluster.observing import ObserveSettings

_DEFAULT = ObserveSettings()
_PORTS = Limits(0, 65535)

_observe = partial(Option, "observability")

OBSERVABILITY = (
    _observe(
        "metrics_port",
        INTEGER,
        _DEFAULT.router_port,
        "where Prometheus may scrape a router and finds all others (/metrics, /targets), on the "
        "interface of hop_host; where it is taken, the next free one; 0: any",
        limits=_PORTS,
        unit="PORT",
    ),
    _observe(
        "engine_metrics_port",
        INTEGER,
        _DEFAULT.engine_port,
        "the same for engines; Prometheus finds them through a router",
        limits=_PORTS,
        unit="PORT",
    ),
    _observe(
        "log_format",
        TEXT,
        _DEFAULT.log_format,
        "of routers and engines: lines for people, or one JSON object per line",
        choices=FORMATS,
    ),
    _observe(
        "log_level",
        TEXT,
        _DEFAULT.log_level,
        "what is logged at least",
        choices=LEVELS,
    ),
)
