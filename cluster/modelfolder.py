"""The model's folder on this machine: a path that every node has, or one to be pulled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.core.errors import ConfigError


def local_folder(model: str, progress: Callable[[str, float], None]) -> Path:
    """model: a path, or the name of a model that `headway pull` knows.

    Raises PullError, ModelError, ConfigError for terms that nobody has accepted here; a path is not
    looked at: whoever loads it does.
    """
    from workers import manifest
    from workers.cachedir import default_cache_dir
    from workers.sources import SOURCES

    source = SOURCES.get(model)
    if source is None:
        return Path(model)
    folder = default_cache_dir() / "models" / source.name
    if manifest.objection(folder) is None:
        return folder
    if source.terms:
        raise ConfigError(
            f"{source.name} has terms ({source.terms}): read them, then run "
            f"`headway pull {source.name} --accept-terms` on every node"
        )
    # Only here: converting needs torch, which routers do without.
    from workers.pull import pull

    return pull(source, default_cache_dir(), progress)
