"""Instruction sets that the kernels are compiled for, and which of them this CPU has."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ConfigError

LEVEL_VARIABLE = "HEADWAY_NATIVE_LEVEL"
"""Environment variable that names the best level to use, for tests and comparisons."""

_CPU_FACTS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """cpu_flags: what /proc/cpuinfo must list. compiler_flags: what turns them on."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


def _level(name: str, cpu_flags: str) -> Level:
    """Compilers call a feature as the kernel does, but for underscores."""
    flags = cpu_flags.split()
    spelled = {"avx512_bf16": "-mavx512bf16"}
    options = [spelled.get(flag, "-m" + flag.replace("_", "-")) for flag in flags]
    return Level(name, frozenset(flags), tuple(options))


_AVX2 = "avx2 fma"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512dq avx512vl"
_BF16 = f"{_AVX512} avx512_bf16"

LEVELS = (
    _level("amx", f"{_BF16} amx_tile amx_bf16"),
    _level("avx512_bf16", _BF16),
    _level("avx512", _AVX512),
    _level("avx2", _AVX2),
    # What the compiler takes for granted on the architecture, x86 or not.
    Level("scalar", frozenset(), ()),
)
"""Best first."""


def usable_levels() -> list[Level]:
    """The levels this CPU has, best first, from the one that the environment names downwards.

    Raises ConfigError when the environment names an unknown level.
    """
    names = [level.name for level in LEVELS]
    best = os.environ.get(LEVEL_VARIABLE, names[0])
    if best not in names:
        raise ConfigError(f"{LEVEL_VARIABLE} must be one of {names}, got {best!r}")
    present = _cpu_flags()
    return [level for level in LEVELS[names.index(best) :] if level.cpu_flags <= present]


@functools.cache
def _cpu_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, []))
