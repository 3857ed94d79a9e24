"""The header of a safetensors file, checked byte by byte before the file is mapped.

Format: 8 bytes little endian N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the
data buffer that the offsets refer to. The tensors must cover the buffer without hole or overlap
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.errors import ModelError

MAX_HEADER_BYTES = 100 << 20
_LENGTH_BYTES = 8
_METADATA_KEY = "__metadata__"

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Weight types that can be loaded. Others exist (I8, F8_E4M3, ...) and are refused by name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its type, shape and [begin, end) in bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of `path` by name. Raises ModelError naming the file, the tensor, the reason."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(_LENGTH_BYTES), size)
            text = file.read(length)
    except FileNotFoundError:
        raise ModelError(f"{path}: file does not exist") from None
    except OSError as error:
        raise ModelError(f"{path}: not readable: {error}") from error
    header = _parse(path, text)
    header.pop(_METADATA_KEY, None)
    start = _LENGTH_BYTES + length
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    _check_coverage(path, entries, start, size)
    return entries


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise ModelError(f"{path}: truncated: {size} bytes, a header needs at least 8")
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
    if not 2 <= length <= limit:
        raise ModelError(f"{path}: header length must be in [2, {limit}], got {length}")
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key appears twice")
        return values

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: header must be a JSON object, found {type(header).__name__}")
    return header


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise ModelError(f"{where}: header entry must be an object, got {value!r}")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelError(f"{where}: dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}")
    if not _natural_numbers(shape):
        raise ModelError(f"{where}: shape must be a list of integers >= 0, got {shape!r}")
    if not _natural_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where}: data_offsets must be [begin, end], got {offsets!r}")
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise ModelError(
            f"{where}: data_offsets {offsets} span {offsets[1] - offsets[0]} bytes, "
            f"shape {shape} of {dtype} needs {expected}"
        )
    return TensorEntry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _natural_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )


def _check_coverage(path: Path, entries: dict[str, TensorEntry], start: int, size: int) -> None:
    position, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < position:
            raise ModelError(f"{path}: tensor {name!r} overlaps {previous!r}")
        if entry.begin > position:
            gap = entry.begin - position
            raise ModelError(f"{path}: hole of {gap} bytes before tensor {name!r}")
        if entry.end > size:
            raise ModelError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end} of {size}"
            )
        position, previous = entry.end, name
    if position != size:
        raise ModelError(f"{path}: {size - position} bytes after the last tensor belong to none")
