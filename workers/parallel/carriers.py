"""Which collectives a group uses, and how its ranks come together."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cluster.core.errors import ConfigError, WireError
from workers.native.bindings import load_group_calls
from workers.native.build import BuildError
from workers.parallel import shm, torchdist
from workers.parallel.collectives import Shard
from workers.parallel.frames import Setup
from workers.parallel.shm import SharedMemoryGroup
from workers.parallel.torchdist import Store, TorchGroup

CARRIERS = ("auto", "shm", "gloo", "nccl", "local")
"""local: all ranks as threads of one process."""

Group: TypeAlias = SharedMemoryGroup | TorchGroup


def choose_carrier(name: str, device: torch.device) -> str:
    """ "auto" takes NCCL on GPUs; on the CPU shared memory, and gloo where it cannot be compiled.

    Raises ConfigError for an unknown name or one that this device or machine cannot use.
    """
    if name not in CARRIERS:
        raise ConfigError(f"collectives must be one of {list(CARRIERS)}, got {name!r}")
    on_cpu = device.type == "cpu"
    if name == "auto":
        if not on_cpu:
            return "nccl"
        return "gloo" if _not_compiled() else "shm"
    if name == "shm" and (problem := _not_compiled() if on_cpu else "it moves CPU tensors only"):
        raise ConfigError(f"collectives 'shm': {problem}")
    if name in ("gloo", "nccl") and (name == "nccl") == on_cpu:
        needed = "cuda" if name == "nccl" else "cpu"
        raise ConfigError(f"collectives {name!r} needs device {needed!r}, got {device.type!r}")
    return name


@dataclass(slots=True)
class Meeting:
    """Where a group's ranks meet, prepared by rank 0. memory: descriptor to send along, for shm.
    port: of the store, for the others."""

    carrier: str
    size: int
    memory: int | None = None
    store: Store | None = None

    @property
    def port(self) -> int:
        return 0 if self.store is None else int(self.store.port)

    def join(self) -> Group:
        """Rank 0's view. Over gloo and NCCL it returns when all ranks have joined."""
        place = Shard(0, self.size)
        if self.memory is not None:
            return SharedMemoryGroup(place, self.memory)
        if self.store is None:
            raise RuntimeError("neither memory nor a store to meet at")
        return TorchGroup(place, self.carrier, self.store)

    def close(self) -> None:
        """Everybody has joined: the descriptor is not needed any more. Idempotent."""
        if self.memory is not None:
            with suppress(OSError):
                os.close(self.memory)
            self.memory = None


def prepare_meeting(carrier: str, size: int) -> Meeting:
    if carrier == "shm":
        return Meeting(carrier, size, memory=shm.create_memory(size))
    return Meeting(carrier, size, store=torchdist.create_store(size))


def join_group(setup: Setup, shard: Shard, connection: socket.socket) -> Group:
    """A rank's view, for ranks other than 0. Raises WireError when the memory does not come."""
    if setup.carrier != "shm":
        return TorchGroup.join(shard, setup.carrier, setup.port)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise WireError("the leader sent no shared memory")
    try:
        return SharedMemoryGroup(shard, descriptors[0])
    finally:
        os.close(descriptors[0])


def _not_compiled() -> str | None:
    try:
        load_group_calls()
    except BuildError as error:
        return str(error)
    return None
