"""`headway config`: what the configuration is, means, and may be."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import DEFAULT, Setting, load_settings
from cluster.config.options import SECTIONS
from cluster.config.render import markdown, sample_toml, toml_value
from cluster.findings import lines

if TYPE_CHECKING:
    from cluster.config.check import Report

EXIT_IMPOSSIBLE = 2


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "config",
        help="check, explain and document the configuration",
        description="What the flags, the environment and the file together mean.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="explain every value and refuse the impossible",
        description="Takes the options of `headway serve`, starts nothing, and says every value, "
        "where it came from, and what follows: memory, KV blocks, ports. Exit code 2 when it "
        "cannot work.",
    )
    add_config_flags(check)
    check.add_argument("--json", action="store_true", help="print one line of JSON")
    check.set_defaults(run=run_check)
    show = commands.add_parser(
        "show", help="print the sample file, or the documentation, of all options"
    )
    show.add_argument("--format", default="toml", choices=("toml", "markdown"))
    show.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    print(markdown() if args.format == "markdown" else sample_toml(), end="")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """0 when it can work, else 2."""
    configured = load_settings(args.config, flags_of(args), os.environ)
    # Late: it imports torch, and what cannot even be read is refused before.
    from cluster.config.check import check

    report = check(configured)
    print(json.dumps(report.as_dict()) if args.json else _text(report))
    return 0 if report.possible else EXIT_IMPOSSIBLE


def _text(report: Report) -> str:
    out = []
    for section in SECTIONS:
        settings = [s for s in report.configured.values.values() if s.option.section == section]
        width = max(len(_value(setting)) for setting in settings)
        out.append(f"[{section}]")
        out += [_line(setting, width) for setting in settings]
        out.append("")
    verdict = "this can work" if report.possible else "this cannot work"
    return "\n".join([*out, *lines(report.findings), "", verdict])


def _value(setting: Setting) -> str:
    if setting.value is None:
        return f"{setting.option.key} unset"
    shown = "(hidden)" if setting.option.secret else toml_value(setting.value)
    return f"{setting.option.key} = {shown}"


def _line(setting: Setting, width: int) -> str:
    what = setting.option.help
    if setting.value is None:
        what += f"; unset: {setting.option.unset}"
    source = "" if setting.source == DEFAULT else f"[{setting.source}] "
    return f"  {_value(setting):<{width}}  {source}{what}"
