"""What is known of a node: plain values that travel through Ray and are judged in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

PortState: TypeAlias = str
"""Empty when one can listen there, else why not."""


@dataclass(frozen=True, slots=True)
class Package:
    """installed: version, None without one. tested: the range that our own metadata asks for."""

    name: str
    installed: str | None
    tested: str


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """seen: lines of nvidia-smi, one per card. driver: its version, "" without one. usable: what
    torch can use. cuda, nccl: that torch was built with, "" for a CPU build."""

    seen: tuple[str, ...] = ()
    driver: str = ""
    usable: tuple[Gpu, ...] = ()
    cuda: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Of the CPU kernels. level: the best instruction set that this CPU has. compiler, library:
    paths, "" without one; the library is one that was built before."""

    level: str
    compiler: str
    library: str


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """Bytes, None where there is no such thing. cache: the folder of models and kernels; problem:
    why it cannot be written to, "" when it can. model_bytes: disk that a first start still takes.
    """

    memory_free: int
    memory_total: int
    shm_free: int | None
    shm_total: int | None
    disk_free: int
    cache: str
    cache_problem: str
    model_bytes: int
    open_files: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """clock_s: seconds since 1970 when it was asked. clock_synced: None where nobody can tell.
    code: digest of Headway's own files. own_name_s: how long it takes to look up the node's own
    name. ports: by what they are for and their address."""

    host: str
    python: str
    headway: str
    code: str
    packages: tuple[Package, ...]
    gpu: GpuFacts
    kernels: KernelFacts
    room: RoomFacts
    cores: int
    clock_s: float
    clock_synced: bool | None
    own_name_s: float
    ports: dict[str, PortState] = field(default_factory=dict)
