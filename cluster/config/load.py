"""Read the configuration: a flag goes before the environment, that before the file, that before
the default."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.option import Option, Value
from cluster.config.options import BY_NAME, OPTIONS, SECTIONS, of_section
from cluster.core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from cluster.settings import ServeSettings

FILE_VARIABLE = "HEADWAY_CONFIG"
"""Names the file where no flag does."""

DEFAULT = "default"

_SERVICE_LINKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT")
"""How the variables end, or go on after an "_PORT_", that Kubernetes makes of the names of
services: none of ours, whatever they begin with."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option's value. source: the flag, the variable, the file with the section, or "default",
    where None means what the option's `unset` says."""

    option: Option
    value: Value
    source: str = DEFAULT


@dataclass(frozen=True, slots=True)
class Configured:
    """Every option's value and where it came from. file: that was read, if any."""

    values: Mapping[str, Setting]
    file: Path | None = None

    def __getitem__(self, name: str) -> Any:
        """The value of "section.key"; of the type that the option's kind says, or None."""
        return self.values[name].value

    def settings(self, model_folder: Path, gpus_per_rank: int | None = None) -> ServeSettings:
        """gpus_per_rank: None asks torch what this machine has (see mapping.gpus_per_rank).

        Raises ConfigError for values that do not go together, naming where they came from.
        """
        from cluster.config.mapping import gpus_per_rank as detect
        from cluster.config.mapping import serve_settings

        gpus = detect(self) if gpus_per_rank is None else gpus_per_rank
        with self.naming_sources():
            return serve_settings(self, model_folder, gpus)

    @contextlib.contextmanager
    def naming_sources(self) -> Iterator[None]:
        """A ConfigError from within says where the options came from that it is about."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self.with_sources(str(error))) from error

    def with_sources(self, message: str) -> str:
        """The message, and where the options came from that it names and somebody set."""
        words = {word.strip("'\",:;()") for word in message.split()}
        # What core calls by its unit (itl_objective_s) is the same option.
        words |= {word.removesuffix("_s") for word in words}
        named = (s for s in self.values.values() if s.option.key in words and s.source != DEFAULT)
        found = [f"{s.option.key} from {s.source}" for s in named]
        return f"{message} ({'; '.join(found)})" if found else message


def load_settings(
    config: Path | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Configured:
    """config: the file; without one $HEADWAY_CONFIG, if set. flags: by option name, texts as typed
    (`config.flags.flags_of`). environ: the process's; only variables of ours are looked at.

    Raises ConfigError naming everything that is wrong: unknown names, types, limits, with the
    value and where it came from.
    """
    if config is None and environ.get(FILE_VARIABLE):
        config = Path(environ[FILE_VARIABLE])
    problems: list[str] = []
    found = dict(_from_file(config, problems)) if config is not None else {}
    found |= dict(_from_environment(environ, problems))
    found |= dict(_from_flags(flags, problems))
    if problems:
        raise ConfigError("\n  ".join(problems))
    unset = {option.name: Setting(option, option.default) for option in OPTIONS}
    return Configured(unset | found, config)


Found = Iterable[tuple[str, Setting]]


def _from_flags(flags: Mapping[str, object], problems: list[str]) -> Found:
    for name, given in flags.items():
        option = BY_NAME[name]
        try:
            value = option.from_text(given) if isinstance(given, str) else option.from_value(given)
        except ValueError as error:
            problems.append(f"{option.key} {error} (from {option.flag})")
        else:
            yield name, Setting(option, value, option.flag)


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Found:
    known = {option.variable: option for option in OPTIONS}
    prefixes = tuple(f"HEADWAY_{section}_".upper() for section in SECTIONS)
    for variable, text in sorted(environ.items()):
        option = known.get(variable)
        if option is None:
            if variable.startswith(prefixes) and not _is_service_link(variable):
                hint = _nearest(variable, known)
                problems.append(f"environment: {variable} is no variable of Headway{hint}")
            continue
        try:
            value = option.from_text(text)
        except ValueError as error:
            shown = "has a value that cannot be used" if option.secret else str(error)
            problems.append(f"{option.key} {shown} (from {variable})")
        else:
            yield option.name, Setting(option, value, variable)


def _is_service_link(variable: str) -> bool:
    return variable.endswith(_SERVICE_LINKS) or "_PORT_" in variable


def _from_file(path: Path, problems: list[str]) -> Found:
    for section, table in _read(path).items():
        if section not in SECTIONS:
            whole = f"[{section}]" if isinstance(table, dict) else section
            hint = _nearest(section, SECTIONS)
            problems.append(f"{path}: {whole} is no section{hint}")
        elif not isinstance(table, dict):
            problems.append(f"{path}: {section} must be a section, [{section}], got {table!r}")
        else:
            yield from _from_section(path, section, table, problems)


def _from_section(
    path: Path, section: str, table: Mapping[str, object], problems: list[str]
) -> Found:
    options = {option.key: option for option in of_section(section)}
    source = f"{path} [{section}]"
    for key, given in table.items():
        option = options.get(key)
        if option is None:
            problems.append(f"{path}: [{section}] has no key {key!r}{_elsewhere(key, options)}")
        elif option.secret:
            problems.append(
                f"{path}: {key} must not stand in a file in clear; "
                f"use {key}_file, or the variable {option.variable}"
            )
        else:
            try:
                value = option.from_value(given, path.absolute().parent)
            except ValueError as error:
                problems.append(f"{key} {error} (from {source})")
            else:
                yield option.name, Setting(option, value, source)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}: is not UTF-8 ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path}: is not TOML: {error}") from error


def _elsewhere(key: str, here: Iterable[str]) -> str:
    """The same key in another section is likelier meant than one that is spelled alike."""
    others = [option.section for option in OPTIONS if option.key == key]
    return f"; it belongs in [{others[0]}]" if others else _nearest(key, here)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"
