"""What the facts of a node mean, and what to do about them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from cluster import preflight
from cluster.config.capacity import BASE_BYTES, SHM_BYTES
from cluster.doctor.facts import GpuFacts, NodeFacts, Package
from cluster.findings import Finding, mebibytes, ok, problem, warning

MIN_OPEN_FILES = 1024
GOOD_OPEN_FILES = 8192
"""A socket per stream and some per process of Ray."""
SLOW_NAME_S = 1.0
"""A name server that does not answer takes five seconds or more."""


def findings(node: NodeFacts) -> Iterator[Finding]:
    """Everything about one node by itself."""
    yield from _python(node)
    yield from _packages(node.packages)
    yield from _gpu(node.gpu)
    yield from _kernels(node)
    yield from _memory(node)
    yield from _disk(node)
    yield from _open_files(node)
    for what, state in node.ports.items():
        yield _port(what, state)
    yield _clock(node)
    yield _own_name(node)


def _python(node: NodeFacts) -> Iterator[Finding]:
    version = tuple(int(part) for part in node.python.split(".")[:2])
    if preflight.MIN_PYTHON <= version < preflight.MAX_PYTHON:
        yield ok("python", node.python)
    else:
        low, high = (".".join(map(str, v)) for v in (preflight.MIN_PYTHON, preflight.MAX_PYTHON))
        yield problem(
            "python",
            f"{node.python} is not supported",
            f"use one from {low} up to, without, {high}",
        )
    if node.headway == "unknown":
        advice = "`pip install .` in the checkout"
        yield warning("headway", "runs from a checkout that is not installed", advice)
    else:
        yield ok("headway", f"{node.headway}, code {node.code}")


def _packages(packages: tuple[Package, ...]) -> Iterator[Finding]:
    fine = []
    for package in packages:
        if package.installed is None:
            advice = f'pip install "{package.name}{package.tested}"'
            yield problem("packages", f"{package.name} is not installed", advice)
        elif not _within(package.installed, package.tested):
            yield warning(
                "packages",
                f"{package.name} {package.installed} is outside of what is tested, "
                f"{package.tested}",
                f'pip install "{package.name}{package.tested}"',
            )
        else:
            fine.append(f"{package.name} {package.installed}")
    if fine:
        yield ok("packages", ", ".join(fine))


def _within(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _gpu(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.usable:
        cards = ", ".join(
            f"{card.name} ({mebibytes(card.memory_bytes)}, compute capability {card.capability})"
            for card in gpu.usable
        )
        driver = f"driver {gpu.driver}" if gpu.driver else "driver of unknown version"
        yield ok("GPU", f"{cards}; {driver}, torch for CUDA {gpu.cuda}")
        if gpu.nccl:
            yield ok("NCCL", gpu.nccl)
        elif len(gpu.usable) > 1:
            advice = "install a CUDA build of torch, which brings it"
            yield problem("NCCL", "torch has none: ranks on GPUs cannot exchange", advice)
        if len(gpu.seen) > len(gpu.usable):
            yield warning(
                "GPU",
                f"{len(gpu.seen)} are in the machine, torch can use {len(gpu.usable)}",
                "look at CUDA_VISIBLE_DEVICES",
            )
    elif not gpu.seen:
        yield ok("GPU", "none: engines run on the CPU")
    elif not gpu.cuda:
        yield problem(
            "GPU",
            f"{gpu.seen[0]} is here, but torch is a build for the CPU",
            "install torch from an index with CUDA wheels, or serve with --device cpu",
        )
    else:
        yield problem(
            "GPU",
            f"{gpu.seen[0]} is here, but torch for CUDA {gpu.cuda} cannot use it",
            "update the driver, or take torch for an older CUDA; in a container: --gpus all",
        )


def _kernels(node: NodeFacts) -> Iterator[Finding]:
    kernels = node.kernels
    yield ok("CPU", f"{node.cores} cores, kernels of level {kernels.level}")
    if kernels.library:
        yield ok("kernels", f"compiled before: {kernels.library}")
    elif kernels.compiler:
        yield ok("kernels", f"compiled at the first start, by {kernels.compiler}")
    elif node.gpu.usable:
        yield ok("kernels", "no C++ compiler; a GPU does without")
    else:
        yield warning(
            "kernels",
            "no C++ compiler and none compiled before: a CPU engine is slower without them",
            "apt-get install g++, then `python -m workers.native`",
        )


def _memory(node: NodeFacts) -> Iterator[Finding]:
    room = node.room
    text = f"{mebibytes(room.memory_free)} of {mebibytes(room.memory_total)} free"
    if room.memory_free < BASE_BYTES:
        need = f"{mebibytes(BASE_BYTES)} are needed beside the model"
        yield problem("memory", f"{text}, {need}", "free some, or raise the container's limit")
    else:
        yield ok("memory", text)
    if room.shm_free is None or room.shm_total is None:
        advice = "Ray then keeps its objects on disk"
        yield warning("shared memory", f"no {preflight.SHM}", advice)
        return
    text = f"{mebibytes(room.shm_free)} of {mebibytes(room.shm_total)} free in {preflight.SHM}"
    if room.shm_free < SHM_BYTES:
        advice = "start the container with --shm-size=1g (Kubernetes: an emptyDir of medium Memory)"
        yield problem("shared memory", f"{text}, {mebibytes(SHM_BYTES)} are needed", advice)
    else:
        yield ok("shared memory", text)


def _disk(node: NodeFacts) -> Iterator[Finding]:
    room = node.room
    if room.cache_problem:
        advice = "set HEADWAY_CACHE to a folder that you may write to"
        if not room.model_bytes:
            yield warning("cache", f"not writable: {room.cache_problem}", advice)
        else:
            yield problem("cache", f"not writable: {room.cache_problem}", advice)
    text = f"{mebibytes(room.disk_free)} free at {room.cache}"
    if room.disk_free < room.model_bytes:
        need = f"the embedded model takes {mebibytes(room.model_bytes)} to fetch"
        yield problem("disk", f"{text}, {need}", "set HEADWAY_CACHE to another disk")
    else:
        yield ok("disk", text)


def _open_files(node: NodeFacts) -> Iterator[Finding]:
    limit = node.room.open_files
    advice = f"ulimit -n {GOOD_OPEN_FILES * 8} (systemd: LimitNOFILE)"
    if limit < 0 or limit >= GOOD_OPEN_FILES:
        yield ok("open files", "no limit" if limit < 0 else f"{limit} at most")
    elif limit >= MIN_OPEN_FILES:
        yield warning("open files", f"{limit} at most: few for many streams", advice)
    else:
        yield problem("open files", f"{limit} at most: Ray alone takes more", advice)


def _port(what: str, state: str) -> Finding:
    if not state:
        return ok("port", f"{what}: free")
    advice = "fine if that is this application or its Ray; else stop it or take another"
    return warning("port", f"{what}: {state}", advice)


def _clock(node: NodeFacts) -> Finding:
    if node.clock_synced is False:
        advice = "run chrony or systemd-timesyncd; tokens do not depend on it, reading logs does"
        return warning("clock", "not synchronised, says the kernel", advice)
    return ok("clock", "synchronised" if node.clock_synced else "nobody can tell whether it is set")


def _own_name(node: NodeFacts) -> Finding:
    took = f"{node.host}, looked up in {node.own_name_s:.1f} s"
    if node.own_name_s < SLOW_NAME_S:
        return ok("name", took)
    advice = f"put a line `ADDRESS {node.host}` in /etc/hosts; every process of Ray waits for it"
    return warning("name", took, advice)
