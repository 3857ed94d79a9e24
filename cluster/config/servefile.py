"""Ray Serve's own configuration file, as far as it says something of this application."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.core.errors import ConfigError

IMPORT_PATH = "cluster.deployed:build"
ARGUMENTS = ("config", "generation")
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ServeFile:
    """config: the TOML file, None for none. generation: another one replaces every replica."""

    config: Path | None = None
    generation: str = ""


def is_serve_file(path: Path | None) -> bool:
    return path is not None and path.suffix in SUFFIXES


def read_serve_file(path: Path) -> ServeFile:
    """What the file passes to this application. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    ours = [
        one
        for one in applications or []
        if isinstance(one, dict) and one.get("import_path") == IMPORT_PATH
    ]
    if len(ours) != 1:
        raise ConfigError(
            f"{path} must have one application with import_path {IMPORT_PATH}, it has {len(ours)}; "
            "start from deploy/serve.yaml"
        )
    return parse_arguments(ours[0].get("args") or {}, f"{path}: ")


def parse_arguments(args: Any, where: str = "") -> ServeFile:
    """The application's `args`. Raises ConfigError."""
    if not isinstance(args, dict):
        raise ConfigError(f"{where}args must be a mapping, got {args!r}")
    if unknown := sorted(str(name) for name in args.keys() - set(ARGUMENTS)):
        raise ConfigError(f"{where}args may be config and generation, got {', '.join(unknown)}")
    for name, value in args.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}{name} must be a string, got {value!r}")
    config = args.get("config")
    return ServeFile(Path(config) if config else None, args.get("generation", ""))
