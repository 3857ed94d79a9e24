"""Prints the tables of docs/metrics.md."""

from __future__ import annotations

from cluster.metrics import engine, process, router
from cluster.metrics.family import Family, markdown


def tables() -> str:
    """All families, those of every process last."""
    parts = []
    for title, families in (
        ("Routers", _own(router.FAMILIES)),
        ("Engines", _own(engine.FAMILIES)),
        ("Every process", process.FAMILIES),
    ):
        total = sum(family.series for family in families)
        parts.append(f"### {title}: {total} series\n\n{markdown(families)}")
    return "\n\n".join(parts)


def _own(families: tuple[Family, ...]) -> tuple[Family, ...]:
    return tuple(family for family in families if family not in process.FAMILIES)


if __name__ == "__main__":
    print(tables())
