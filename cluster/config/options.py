"""The table of options. Flags, environment, file, their documentation: all derive from it.

A new option is one entry in `tables`, and one line where `cluster.config.mapping` hands it on.
"""

from __future__ import annotations

from cluster.config.option import Option
from cluster.config.tables.engine import ENGINE, SCHEDULING
from cluster.config.tables.observing import OBSERVABILITY
from cluster.config.tables.scaling import AUTOSCALING, ROLLOUT
from cluster.config.tables.serving import FLEET, FRONT_DOOR, MODEL, ROUTER

SECTIONS = {
    "model": "what is served",
    "fleet": "how many engines and routers, and how they find each other",
    "front_door": "where clients call, and who may",
    "engine": "one engine: device, kernels, memory, limits of a step",
    "scheduling": "what an engine computes next",
    "router": "which engine a request goes to, and who has to wait or is refused",
    "autoscaling": "how many engines, when that depends on what there is to do",
    "rollout": "how engines and routers give way to others",
    "observability": "metrics and logs",
}
"""Sections of the file, in its order, with what they are about."""

OPTIONS: tuple[Option, ...] = (
    *MODEL,
    *FLEET,
    *FRONT_DOOR,
    *ENGINE,
    *SCHEDULING,
    *ROUTER,
    *AUTOSCALING,
    *ROLLOUT,
    *OBSERVABILITY,
)

BY_NAME = {option.name: option for option in OPTIONS}
"""By "section.key"."""


def of_section(section: str) -> list[Option]:
    return [option for option in OPTIONS if option.section == section]
