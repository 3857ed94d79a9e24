"""Sizes and checksums of a converted model folder, kept beside its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, Any

MANIFEST_FILE = "headway-manifest.json"
FORMAT = 1
"""Raised when the conversion changes, so that folders written by an older one are replaced."""

_CHUNK = 1 << 20


def write(folder: Path) -> None:
    """Record every file of `folder`."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n"
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def objection(folder: Path) -> str | None:
    """Why `folder` is not what its manifest says, by sizes only; None when it is."""
    files = _read(folder)
    if files is None:
        return f"{folder / MANIFEST_FILE}: missing, unreadable or of another format"
    for name, facts in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != facts["bytes"]:
            return f"{path}: must have {facts['bytes']} bytes, found {found}"
    return None


def digest_objection(folder: Path) -> str | None:
    """The same by SHA-256; reads every byte."""
    for name, facts in (_read(folder) or {}).items():
        found = file_digest(folder / name)
        if found != facts["sha256"]:
            return f"{folder / name}: must have SHA-256 {facts['sha256']}, found {found}"
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def copy_hashed(
    source: IO[bytes], target: IO[bytes], max_bytes: int, digest: hashlib._Hash
) -> None:
    """Append a stream to `target` and to `digest`. Raises ValueError beyond `max_bytes`."""
    copied = 0
    while chunk := source.read(_CHUNK):
        copied += len(chunk)
        if copied > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
        digest.update(chunk)
        target.write(chunk)


def _read(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        value = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = value["files"]
        complete = all({"bytes", "sha256"} <= set(facts) for facts in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if complete and value.get("format") == FORMAT else None
