"""`headway status`: the fleet at a glance."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import TYPE_CHECKING

from cluster.commands import common

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headway.client import Status
    from headway.types import Engine


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show engines, blocks and load",
        description="Show the engines as the router sees them.",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    common.add_interval_option(parser, 1.0)
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the router answered, 1 when it did not, 2 for bad options."""
    return common.reporting_errors(_status, args)


def _status(args: argparse.Namespace) -> int:
    from headway.client import Client

    interval_s, timeout_s = common.asking_again(args)
    with Client(common.connection_of(args)) as client:
        if args.json:
            while True:
                status = client.status(timeout_s=timeout_s)
                print(json.dumps(dataclasses.asdict(status), ensure_ascii=False), flush=True)
                if not args.watch:
                    return common.EXIT_OK
                time.sleep(interval_s)
        from rich.console import Console

        if not args.watch:
            Console().print(render(client.status(timeout_s=timeout_s)))
            return common.EXIT_OK
        from rich.live import Live

        with Live(render(client.status(timeout_s=timeout_s)), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(render(client.status(timeout_s=timeout_s)), refresh=True)


def render(status: Status) -> RenderableType:
    """The table, with one line about router and model above it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    model = "no model yet" if status.model is None else status.model.name
    ready = Text("ready", "green") if status.ready else Text("not ready", "red")
    head = Text(f"headway {status.version}  {model}  up {status.uptime_s:.0f} s  ")
    head.append(f"{status.active_streams} streams  ").append(ready)
    if status.queued:
        head.append(f"  {status.queued} queued ({status.queued_tokens} tokens)")
    # Fits a terminal of 80; epoch and step are in the JSON. Where it does not fit, the engine's id
    # is cut and not the address: that is what people copy.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("engine", overflow="ellipsis", min_width=8)
    table.add_column("address", no_wrap=True)
    for name in ("free/blocks", "run", "wait", "tok/s", "preempt", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in status.engines:
        # As Text, or an IPv6 address would be read as markup and emoji codes.
        table.add_row(*map(Text, _row(engine)), style=None if engine.connected else "red")
    return Group(head, table)


def _row(engine: Engine) -> list[str]:
    return [
        engine.engine_id,
        engine.address,
        f"{engine.blocks_free}/{engine.blocks_total}",
        str(engine.running),
        str(engine.waiting),
        f"{engine.tokens_per_s:.1f}",
        str(engine.preemptions),
        _state(engine),
    ]


def _state(engine: Engine) -> str:
    if not engine.connected:
        return "lost"
    return "draining" if engine.draining else f"{engine.frame_age_s:.2f} s"
