"""The application on a cluster that is there already: for `headway deploy`, `serve deploy` and
KubeRay."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.serve import Application

from cluster.actors.secret import cluster_secret
from cluster.app import application
from cluster.config.load import DEFAULT, Configured, load_settings
from cluster.config.mapping import DEFAULT_CPU_SHARE
from cluster.config.servefile import parse_arguments
from cluster.core.errors import ConfigError
from cluster.rollout import StartFailed
from cluster.settings import ServeSettings

NODE_PERIOD_S = 0.5


def build(args: Mapping[str, str]) -> Application:
    """The application builder of Serve's configuration files.

    args: "config", a TOML file that the head node has; "generation", anything: another one
    replaces every replica.
    """
    given = parse_arguments(dict(args))
    configured = load_settings(given.config, {}, os.environ)
    return application(cluster_settings(configured, given.generation))


def cluster_settings(configured: Configured, generation: str) -> ServeSettings:
    """What the configuration means on the Ray cluster that this process is connected to."""
    from workers.sources import DEFAULT as EMBEDDED

    model: Path | None = configured["model.path"]
    gpus = _gpus_per_rank(configured)
    # A name is pulled by every node for itself; a path has to be there on every node.
    settings = configured.settings(Path(EMBEDDED.name) if model is None else model, gpus)
    routers = settings.routers
    if settings.routers_per_node and configured.values["fleet.routers"].source == DEFAULT:
        routers = _nodes() * settings.routers_per_node
    share: float | None = configured["engine.kv_memory_share"]
    worker = settings.worker
    if not gpus:
        # Per engine, however many there are: another number of them must not replace them all.
        share = DEFAULT_CPU_SHARE if share is None else share
        worker = dataclasses.replace(worker, kv_memory_share=share)
    own_secret = configured["fleet.hop_secret"] or configured["fleet.hop_secret_file"]
    return dataclasses.replace(
        settings,
        worker=worker,
        routers=routers,
        # An old router and the new one that takes its place listen at the same time.
        gateway=dataclasses.replace(settings.gateway, reuse_port=True),
        secret=settings.secret if own_secret else cluster_secret(settings.secret),
        generation=generation,
    )


def await_nodes(count: int, timeout_s: float, say: Callable[[str], None]) -> None:
    """Until so many nodes belong to the cluster. Raises StartFailed."""
    deadline, said = time.monotonic() + timeout_s, -1
    while (found := _nodes()) < count:
        if found != said:
            say(f"{found} of {count} nodes have joined")
            said = found
        if time.monotonic() > deadline:
            raise StartFailed(
                f"{found} of {count} nodes have joined within {timeout_s:g} s; `ray status` and "
                "the logs of the others say why, or deploy with a smaller --nodes"
            )
        time.sleep(NODE_PERIOD_S)


def _gpus_per_rank(configured: Configured) -> int:
    """1 where the cluster has GPUs and engines are not told to do without."""
    device = configured["engine.device"]
    found = _resources().get("GPU", 0.0)
    if device == "cuda" and not found:
        raise ConfigError(
            configured.with_sources(
                "device cuda: no node of the cluster has a GPU that Ray knows of; "
                "start one with a GPU (`ray start --num-gpus N`) or use --device cpu"
            )
        )
    return int(device != "cpu" and found > 0)


def _resources() -> Mapping[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _nodes() -> int:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return max(1, sum(bool(node["Alive"]) for node in nodes))
