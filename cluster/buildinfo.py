"""Which Headway this is."""

from __future__ import annotations

import importlib.metadata


def headway_version() -> str:
    """The installed version; "unknown" when run from a checkout that was never installed."""
    try:
        return importlib.metadata.version("headway-serving")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
