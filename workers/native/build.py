"""Compile the kernels into the cache folder, once per source, compiler and level."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster.core.errors import HeadwayError
from workers.cachedir import default_cache_dir
from workers.native.levels import Level

SHIPPED_VARIABLE = "HEADWAY_NATIVE_LIBRARIES"
"""Names a folder with libraries that were built elsewhere, from the same sources."""

_SOURCES = Path(__file__).parent
_MAIN = "kernels.cpp"
_COMPILERS = ("g++", "c++", "clang++")
# No -ffast-math: a NaN must stay one, so that a row with bad logits can be told.
# Hidden symbols: the libraries of two levels in one process must not share their inner parts.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
    "-shared",
    "-w",
)
_TIMEOUT_S = 300.0
_ERROR_TAIL = 600


class BuildError(HeadwayError):
    """The kernels cannot be compiled here."""


def find_compiler() -> str | None:
    """$CXX, else the first usual C++ compiler on the path."""
    configured = os.environ.get("CXX")
    candidates = (configured,) if configured else _COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def build(level: Level) -> Path:
    """Path of the compiled library. Raises BuildError with the compiler's last words.

    Safe against other processes that build the same: each writes a file of its own and renames
    it, and whichever comes last replaces an equal one.
    """
    if (shipped := _in_folder(shipped_folder(), level)) is not None:
        return shipped
    compiler = find_compiler()
    target = existing(level) if compiler is None else _target(compiler, level)
    if target is not None and target.exists():
        return target
    if compiler is None or target is None:
        raise BuildError(f"no C++ compiler found ($CXX, {', '.join(_COMPILERS)})")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    except OSError as error:
        raise BuildError(f"{target.parent} is not writable: {error}") from error
    os.close(handle)
    try:
        _compile([compiler, *_FLAGS, *level.compiler_flags, str(_SOURCES / _MAIN), "-o", name])
        os.replace(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-_ERROR_TAIL:]}")


def _target(compiler: str, level: Level) -> Path:
    digest = hashlib.sha256("\0".join((_version(compiler), *_FLAGS)).encode())
    return _folder() / f"{_stem(level)}-{digest.hexdigest()[:8]}.so"


def existing(level: Level) -> Path | None:
    """A library that was built from these sources before, by whatever compiler."""
    return _in_folder(shipped_folder(), level) or _in_folder(_folder(), level)


def shipped_folder() -> Path | None:
    """Where an image without a compiler has its libraries; not in the cache, which is a volume."""
    named = os.environ.get(SHIPPED_VARIABLE)
    return Path(named) if named else None


def _in_folder(folder: Path | None, level: Level) -> Path | None:
    if folder is None:
        return None
    return next(iter(sorted(folder.glob(f"{_stem(level)}-*.so"))), None)


def _folder() -> Path:
    return default_cache_dir() / "native"


@functools.cache
def _stem(level: Level) -> str:
    """Names the level and a digest of the sources and of what the level is."""
    digest = hashlib.sha256("\0".join((platform.machine(), *level.compiler_flags)).encode())
    for path in sorted(_SOURCES.glob("*.cpp")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"kernels-{level.name}-{digest.hexdigest()[:16]}"


@functools.cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return done.stdout
