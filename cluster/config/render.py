"""The options as a sample file and as a page of documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from cluster.config.load import FILE_VARIABLE
from cluster.config.option import Option, Value
from cluster.config.options import SECTIONS, of_section

WIDTH = 98
_HEAD = f"""\
Headway's configuration: every option, commented out, with its default.
Use it with --config FILE or {FILE_VARIABLE}=FILE. A flag goes before the environment variable, that
before this file, that before the default. `headway config check --config FILE` explains the values
and what follows from them. Relative paths start at this file's folder.
Written by `headway config show`."""


def sample_toml() -> str:
    """The sample file: loads as it is, and means the defaults."""
    lines = [f"# {line}" for line in _HEAD.splitlines()]
    for section, about in SECTIONS.items():
        lines += ["", "", f"# {about}", f"[{section}]"]
        for option in of_section(section):
            lines += ["", *_sample(option)]
    return "\n".join(lines) + "\n"


def _sample(option: Option) -> Iterator[str]:
    for line in textwrap.wrap(_sentence(option), WIDTH):
        yield f"# {line}"
    ways = [f"variable {option.variable}"]
    if option.flag:
        ways.insert(0, f"flag {option.flag}")
    yield f"# {', '.join(ways)}"
    if option.secret:
        return
    if option.default is None:
        yield f"# {option.key} = {toml_value(option.example)}  # for example"
    else:
        yield f"# {option.key} = {toml_value(option.default)}"


def _sentence(option: Option) -> str:
    parts = [option.help]
    if option.secret:
        parts.append("from the environment only")
    elif option.choices:
        parts.append(option.expected)
    elif option.limits is not None:
        unit = f" {option.unit.lower()}" if option.unit in ("MS", "SECONDS", "BYTES") else ""
        parts.append(f"{option.limits}{unit}")
    if option.default is None:
        parts.append(f"unset: {option.unset}")
    return "; ".join(parts)


def toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


_PAGE = f"""\
# Configuration

One table of options (`cluster/config/tables/`) is behind the flags of `headway serve` and
`headway deploy`, the environment variables and the TOML file. Where an option is set more than
once, **a flag goes before the environment, that before the file, that before the default**. The
file is named by `--config FILE` or `{FILE_VARIABLE}`;
[`deploy/headway.toml`](../deploy/headway.toml) has every option with its default, ready to be
changed. An unknown section, key or variable is an error that names the nearest known one; a wrong
value is an error that names the limit, the value and where it came from.

```sh
headway config check --config headway.toml      # explain every value, refuse the impossible
headway doctor                                  # check this node; --address auto: a Ray cluster
headway serve --config headway.toml --engines 2
```

Secrets do not stand in the file: API keys, TLS keys and the secret between routers and engines are
files that it names; the last may also come from the environment.

This page is written by `headway config show --format markdown`.
"""


def markdown() -> str:
    """docs/configuration.md."""
    lines = [_PAGE.rstrip()]
    for section, about in SECTIONS.items():
        lines += ["", f"## [{section}]", "", f"{about[0].upper()}{about[1:]}.", ""]
        lines += ["| key | flag | variable | value | default | what |", "|---|---|---|---|---|---|"]
        lines += [_row(option) for option in of_section(section)]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    unit = f" ({option.unit.lower()})" if option.unit in ("MS", "SECONDS", "BYTES") else ""
    default = option.unset if option.default is None else f"`{toml_value(option.default)}`"
    cells = (
        f"`{option.key}`" if not option.secret else "",
        f"`{option.flag}`" if option.flag else "",
        f"`{option.variable}`",
        option.expected + unit,
        default,
        option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
