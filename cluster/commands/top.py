"""`headway top`: engines, queues and tails, live in the terminal."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from cluster.commands import common

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from headway.client import Client, Status
    from headway.types import Engine, Router, Tail

ROWS_BESIDE_ENGINES = 7
"""Lines of a screen that are not an engine's or a router's."""
BAR = 10
TAILS = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("gap", "gap"))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch engines, KV use, queues and tails",
        description="Live view of the fleet, until Ctrl-C. Tails are of the last minute, in "
        "milliseconds, as the routers measured them: median/99th percentile.",
    )
    parser.add_argument("--once", action="store_true", help="print once, all engines, and end")
    common.add_interval_option(parser, 1.0)
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the router answered, 1 when it did not, 2 for bad options."""
    return common.reporting_errors(_top, args)


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from headway.client import Client

    interval_s, timeout_s = common.asking_again(args)
    console = Console()
    with Client(common.connection_of(args)) as client:
        # The first answer also says whether there is anybody.
        first = client.status(timeout_s=timeout_s)
        if args.once:
            console.print(render(first, None))
            return common.EXIT_OK
        try:
            if console.is_terminal:
                _watch(client, console.size.height, interval_s, timeout_s)
            while True:
                console.print(render(first, None), "")
                time.sleep(interval_s)
                first = client.status(timeout_s=timeout_s)
        except KeyboardInterrupt:
            return common.EXIT_OK


def _watch(client: Client, height: int, interval_s: float, timeout_s: float) -> None:
    """Until Ctrl-C. A router that does not answer may be back in a moment: the last view stays,
    with the reason under it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from headway.client import HeadwayRpcError

    with Live(screen=True, auto_refresh=False) as live:
        view: RenderableType = Text("")
        while True:
            try:
                status = client.status(timeout_s=timeout_s)
                view = render(status, max(1, height - ROWS_BESIDE_ENGINES - len(status.routers)))
                live.update(view, refresh=True)
            except HeadwayRpcError as error:
                trouble = Text(f"\nno answer: {' '.join(str(error).split())}", "red")
                live.update(Group(view, trouble), refresh=True)
            time.sleep(interval_s)


def render(status: Status, most: int | None) -> RenderableType:
    """most: engines shown; None for all. Those in trouble, then the fullest, come first."""
    from rich.console import Group
    from rich.text import Text

    engines = sorted(status.engines, key=lambda e: (e.connected, -_kv_use(e), e.engine_id))
    shown = engines if most is None else engines[:most]
    parts: list[RenderableType] = [_head(status), _routers(status.routers), _engines(shown)]
    if len(shown) < len(engines):
        parts.append(Text(f"... and {len(engines) - len(shown)} more", "dim"))
    return Group(*parts)


def _head(status: Status) -> Text:
    from rich.text import Text

    engines = status.engines
    model = "no model yet" if status.model is None else status.model.name
    queued = sum(router.queued for router in status.routers)
    numbers = (
        f"{len(status.routers)} routers",
        f"{len(engines)} engines",
        f"{sum(e.running for e in engines)} running",
        f"{sum(e.waiting for e in engines)} waiting",
        f"{queued} queued",
        f"{sum(e.tokens_per_s for e in engines):.1f} tok/s",
    )
    ready = Text("ready", "green") if status.ready else Text("not ready", "red")
    return Text(f"headway {status.version}  {model}  {'  '.join(numbers)}  ").append(ready)


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def _routers(routers: tuple[Router, ...]) -> Table:
    from rich.text import Text

    table = _table()
    table.add_column("router", overflow="ellipsis", min_width=8)
    for name in ("calls", "queued", *(label for label, _ in TAILS)):
        table.add_column(name, justify="right", no_wrap=True)
    for router in routers:
        tails = {tail.name: tail for tail in router.tails}
        cells = [
            router.router_id,
            str(router.active_streams),
            str(router.queued),
            *(_tail(tails.get(name)) for _, name in TAILS),
        ]
        table.add_row(*map(Text, cells), style=None if router.ready else "red")
    return table


def _engines(engines: list[Engine]) -> Table:
    from rich.text import Text

    table = _table()
    table.add_column("engine", overflow="ellipsis", min_width=8)
    table.add_column("state", no_wrap=True)
    table.add_column("KV", no_wrap=True)
    for name in ("run", "wait", "tok/s", "step ms", "preempt", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in engines:
        cells = [
            engine.engine_id,
            _state(engine),
            _bar(_kv_use(engine)),
            str(engine.running),
            str(engine.waiting),
            f"{engine.tokens_per_s:.1f}",
            f"{engine.step_s * 1e3:.1f}",
            str(engine.preemptions),
            f"{engine.frame_age_s:.1f} s",
        ]
        table.add_row(*map(Text, cells), style=_style(engine))
    return table


def _kv_use(engine: Engine) -> float:
    return 1.0 - engine.blocks_free / engine.blocks_total if engine.blocks_total else 0.0


def _bar(share: float) -> str:
    """Ten cells in eighths would need a font that has them; blocks are in every one."""
    full = min(BAR, round(share * BAR))
    return f"{'█' * full}{'░' * (BAR - full)} {share * 100:3.0f}%"


def _state(engine: Engine) -> str:
    if not engine.connected:
        return "lost"
    if engine.draining:
        return "draining"
    return "busy" if engine.running or engine.waiting else "idle"


def _style(engine: Engine) -> str | None:
    if not engine.connected:
        return "red"
    return "yellow" if engine.draining or _kv_use(engine) > 0.95 else None


def _tail(tail: Tail | None) -> str:
    if tail is None or tail.p50_s is None or tail.p99_s is None:
        return "-"
    return f"{_ms(tail.p50_s)}/{_ms(tail.p99_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
