"""Connecting to a Ray cluster that runs already."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from cluster.actors.coordinator import NAMESPACE
from cluster.core.errors import HeadwayError

CONNECT_S = 5.0


class NoCluster(HeadwayError):
    """There is no Ray cluster at the address."""


@contextmanager
def connected(address: str) -> Iterator[str]:
    """address: HOST:PORT of the head, or "auto" for the cluster that this node belongs to. Yields
    the folder of Ray's logs. Raises NoCluster."""
    _refuse_silence(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        context = ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoCluster(_no_cluster(address, str(error).strip().splitlines()[0])) from error
    try:
        session: str = context.address_info["session_dir"]  # type: ignore[attr-defined]
        yield os.path.join(session, "logs")
    finally:
        ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Ray itself tries for minutes where nobody is."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise NoCluster(_no_cluster(address, error.strerror or str(error))) from error


def _no_cluster(address: str, why: str) -> str:
    return (
        f"no Ray cluster at {address}: {why}; start one with `deploy/up` or `ray start --head`, "
        "name it with --ray-address, or use `headway serve` on this machine alone"
    )
