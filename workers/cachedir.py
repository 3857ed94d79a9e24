"""Where downloaded models and compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$HEADWAY_CACHE, else ~/.cache/headway."""
    configured = os.environ.get("HEADWAY_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "headway"
