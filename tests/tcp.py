"""Who is connected to whom."""

from __future__ import annotations

import psutil


def connections_to(address: str) -> int:
    """Of this process, to "host:port"."""
    return sum(
        bool(c.raddr) and c.raddr.port == _port(address) and c.status == psutil.CONN_ESTABLISHED
        for c in psutil.Process().net_connections("tcp")
    )


def connections_at(address: str, server: psutil.Process) -> int:
    """Those to "host:port" that this server has been dealt."""
    return sum(
        c.laddr.port == _port(address) and c.status == psutil.CONN_ESTABLISHED
        for c in server.net_connections("tcp")
    )


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
