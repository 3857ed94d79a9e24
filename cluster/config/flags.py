"""The options as flags of a command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from cluster.config.load import FILE_VARIABLE
from cluster.config.option import Kind, Option
from cluster.config.options import BY_NAME, SECTIONS, of_section


def add_config_flags(
    parser: argparse.ArgumentParser, sections: Iterable[str] = tuple(SECTIONS)
) -> None:
    """--config, and the flags of all options of `sections`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file with any of the options (default: ${FILE_VARIABLE}, else none); "
        "a flag goes before the environment, that before the file",
    )
    for section in sections:
        group = parser.add_argument_group(section.replace("_", " "), SECTIONS[section])
        for option in of_section(section):
            if option.flag:
                _add(group, option)


def flags_of(args: argparse.Namespace) -> dict[str, object]:
    """What was typed, by option name, unchecked: for `load_settings`."""
    return {name: value for name, value in vars(args).items() if name in BY_NAME}


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    help_text = f"{option.help} (default: {shown_default(option)})".replace("%", "%%")
    # Texts: flags, environment and file are checked in one place, where the source is known.
    # SUPPRESS: what was not typed is not there.
    if option.kind is Kind.SWITCH:
        group.add_argument(
            option.flag,
            dest=option.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=help_text,
        )
        return
    listed = option.choices and option.kind is not Kind.PATH
    metavar = "{" + ",".join(option.choices) + "}" if listed else option.unit or None
    group.add_argument(
        option.flag, dest=option.name, default=argparse.SUPPRESS, metavar=metavar, help=help_text
    )


def shown_default(option: Option) -> str:
    """For people: what happens when nothing is set."""
    if option.default is None:
        return option.unset
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
