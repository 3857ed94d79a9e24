"""A local Hugging Face folder: which file holds which tensor, and access to each by name."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cluster.core.errors import ModelError
from cluster.core.modelinfo import tokenizer_digest
from workers.checkpoint.fields import read_json
from workers.checkpoint.header import TensorEntry, read_header
from workers.checkpoint.modelconfig import (
    CONFIG_FILE,
    ConfigReader,
    ModelConfig,
    read_model_config,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"

_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Old Llama checkpoints save these frequencies; they follow from the config and are not read."""

_SAMPLE_BYTES = 256


class Checkpoint:
    """Opens a folder, checks headers and index, and hands out tensors mapped from disk.

    Only safetensors: nothing in the folder is ever executed or unpickled.
    """

    def __init__(self, folder: str | Path, readers: Mapping[str, ConfigReader]) -> None:
        """`readers`: by architecture. Raises ModelError naming file, key and reason."""
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise ModelError(f"{self.folder}: no such model folder")
        self.config: ModelConfig = read_model_config(self.folder, readers)
        self._files: dict[Path, dict[str, TensorEntry]] = {}
        self._location: dict[str, Path] = self._locate()
        # safe_open has no type hints.
        self._open_files: dict[Path, Any] = {}

    @property
    def main_dtype(self) -> str:
        """The safetensors dtype ("F32", "F16" or "BF16") in which most of the bytes are saved."""
        held: Counter[str] = Counter()
        for name, path in self._location.items():
            entry = self._files[path][name]
            held[entry.dtype] += entry.end - entry.begin
        return held.most_common(1)[0][0]

    @property
    def tensor_names(self) -> set[str]:
        return set(self._location)

    def check_tensors(self, expected: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Compare with (name, shape) pairs, taken one by one so that an absurd layer count fails
        at its first missing tensor. Raises ModelError for a missing, extra or misshapen one."""
        wanted: set[str] = set()
        for name, shape in expected:
            wanted.add(name)
            path = self._location.get(name)
            if path is None:
                raise ModelError(f"{self.folder}: tensor {name!r} is missing from every file")
            found = self._files[path][name].shape
            if found != shape:
                raise ModelError(
                    f"{path}: tensor {name!r} must have shape {list(shape)}, found {list(found)}"
                )
        extra = sorted(set(self._location) - wanted)
        if extra:
            raise ModelError(
                f"{self._location[extra[0]]}: tensor {extra[0]!r} is not part of "
                f"{self.config.architecture} ({len(extra)} such tensors)"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as saved, on the CPU. Raises KeyError for a name that is not there."""
        tensor: torch.Tensor = self._open_file(name).get_tensor(name)
        return tensor

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[begin, end) of each dimension of a tensor, as saved, on the CPU; nothing else of it is
        read. Raises KeyError for a name that is not there."""
        shape = self._files[self._location[name]][name].shape
        if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
            return self.tensor(name)
        selected = tuple(slice(begin, end) for begin, end in bounds)
        tensor: torch.Tensor = self._open_file(name).get_slice(name)[selected]
        return tensor

    def _open_file(self, name: str) -> Any:
        path = self._location[name]
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            except Exception as error:
                raise ModelError(f"{path}: safetensors cannot open it: {error}") from error
        return self._open_files[path]

    def fingerprint(self) -> str:
        """SHA-256 over the config, every tensor's name, type and shape, and a sample of its bytes.

        Samples tell fine-tunes of one architecture apart without reading gigabytes.
        """
        digest = hashlib.sha256()
        config = read_json(self.folder / CONFIG_FILE)
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in sorted(self._files):
            with path.open("rb") as file:
                for name, entry in sorted(self._files[path].items()):
                    digest.update(f"{name}|{entry.dtype}|{entry.shape}|".encode())
                    file.seek(entry.begin)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.end - entry.begin)))
        return digest.hexdigest()

    def tokenizer(self) -> str:
        """See tokenizer_digest(); "" for a folder without tokenizer.json."""
        path = self.folder / TOKENIZER_FILE
        return tokenizer_digest(path.read_bytes()) if path.is_file() else ""

    def close(self) -> None:
        """Drop the file mappings. Tensors already handed out stay valid. Idempotent."""
        self._open_files.clear()

    def _locate(self) -> dict[str, Path]:
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.exists():
            self._files[single] = read_header(single)
            location = dict.fromkeys(self._files[single], single)
        elif index.exists():
            location = self._locate_sharded(index)
        else:
            raise ModelError(self._no_weights())
        return {n: path for n, path in location.items() if not n.endswith(_DERIVED_SUFFIX)}

    def _locate_sharded(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: weight_map must be a non-empty object")
        location: dict[str, Path] = {}
        for name, file_name in weight_map.items():
            # A name with a folder in it would read outside of the model folder.
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ModelError(f"{index}: {name!r} must map to a file name, got {file_name!r}")
            path = self.folder / file_name
            if path not in self._files:
                self._files[path] = read_header(path)
            if name not in self._files[path]:
                raise ModelError(f"{path}: tensor {name!r} is missing, {index.name} puts it here")
            location[name] = path
        for path, entries in self._files.items():
            for name in entries:
                if location.get(name) != path:
                    raise ModelError(f"{path}: tensor {name!r} is not listed in {index.name}")
        return location

    def _no_weights(self) -> str:
        unsafe = [p.name for p in sorted(self.folder.iterdir()) if p.suffix in {".bin", ".pt"}]
        if unsafe:
            return (
                f"{self.folder}: only {unsafe[0]} found; such files run code when loaded and are "
                f"refused: convert the model to safetensors"
            )
        return f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE} found"
