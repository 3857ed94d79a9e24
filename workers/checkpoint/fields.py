"""Typed reading of a JSON object that somebody else wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.core.errors import ModelError

MAX_JSON_BYTES = 100 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when it is missing, unreadable or no object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes, not read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: file does not exist") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Fields:
    """A JSON object with its place, so that every refusal names file, key, limit and value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def has(self, key: str) -> bool:
        """True when the key is there with a value other than null."""
        return self._values.get(key) is not None

    def names(self, key: str) -> bool:
        """True when the key is there, be it with null."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value as it stands, None when absent."""
        return self._values.get(key)

    def integer(self, key: str, low: int, default: int | None = None) -> int:
        """An integer >= low; `default` where the key is absent or null."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refuse(key, f"must be an integer >= {low}, got {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number > 0; `default` where the key is absent or null."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"must be a number > 0, got {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.refuse(key, f"must be finite and > 0, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._require(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._require(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"must be a string, got {value!r}")
        return value

    def child(self, key: str) -> Fields:
        """The object under `key`; an empty one where the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(key, f"must be an object, got {value!r}")
        return Fields(value, f"{self._where}: {key}")

    def refuse(self, key: str, reason: str) -> ModelError:
        """The error to raise about `key`."""
        return ModelError(f"{self._where}: {key} {reason}")

    def _require(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, "is missing")
        return value
