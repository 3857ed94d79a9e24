"""`headway top` as a shell runs it, in front of a gateway that plays a script."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import build_parser
from cluster.commands.top import render
from cluster.text.tokenizer import Tokenizer
from headway.client import Client, Sampling
from headway.types import Engine, Router, Status, Tail
from tests.wire.live import live_gateway
from tests.wire.wire_support import Script, Wire

ROOT = Path(__file__).resolve().parents[2]
DRIVER = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from cluster.cli import main\n"
    "sys.exit(main())\n"
)


def top(*arguments: str) -> int:
    args = build_parser().parse_args(["top", *arguments])
    code: int = args.run(args)
    return code


def spawn(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    environment = dict(
        os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'proto'}", TERM="xterm", COLUMNS="110"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", DRIVER, "top", *arguments],
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def wire(tokenizer: Tokenizer) -> Iterator[Wire]:
    with live_gateway(tokenizer, Script([35, 36], step_s=0.012)) as running:
        yield running


def shown(status: Status, most: int | None = None) -> str:
    from rich.console import Console

    console = Console(width=110)
    with console.capture() as capture:
        console.print(render(status, most))
    return capture.get()


def engine(name: str, free: int = 60, **changes: object) -> Engine:
    facts: dict[str, object] = {
        "engine_id": name,
        "address": "h:1",
        "epoch": 1,
        "connected": True,
        "blocks_total": 100,
        "blocks_free": free,
        "running": 3,
        "waiting": 1,
        "step": 5,
        "tokens_per_s": 10.0,
        "preemptions": 2,
        "frame_age_s": 0.25,
        "step_s": 0.0123,
    }
    return Engine(**{**facts, **changes})  # type: ignore[arg-type]


def fleet(*engines: Engine) -> Status:
    tails = (
        Tail("itl", 900, 0.0121, 0.0249),
        Tail("ttft", 9, 0.2, 1.5),
        Tail("gap", 0, None, None),
    )
    routers = tuple(
        Router(f"router-{n}", "1.0", 5.0, 7, True, 4, 99, 1, "h:2", tails) for n in range(2)
    )
    return Status("1.0", 5.0, 7, True, None, engines, routers=routers)


def test_what_is_shown() -> None:
    text = shown(fleet(engine("a"), engine("b", draining=True, free=50)))
    assert "2 routers  2 engines  6 running  2 waiting  8 queued  20.0 tok/s  ready" in text
    (router,) = [line for line in text.splitlines() if line.startswith("router-1")]
    assert router.split() == ["router-1", "7", "4", "200/1500", "12.1/24.9", "-", "-"]
    (line,) = [line for line in text.splitlines() if line.startswith("b ")]
    assert line.split() == (
        ["b", "draining", "█████░░░░░", "50%", "3", "1", "10.0", "12.3", "2", "0.2", "s"]
    )


def test_those_in_trouble_come_first_and_the_rest_is_counted() -> None:
    engines = [engine(f"e{n:04}", free=100 - n % 90) for n in range(1000)]
    engines[500] = engine("gone", connected=False)
    lines = shown(fleet(*engines), most=20).splitlines()
    rows = [line for line in lines if line.startswith(("e0", "gone"))]
    assert len(rows) == 20
    assert rows[0].startswith("gone")
    assert " 89%" in rows[1]
    assert lines[-1] == "... and 980 more"


def test_once_tells_what_a_stream_just_saw(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(wire.address) as client:
        for _ in client.generate([5, 6], Sampling(max_tokens=12)):
            pass
    assert top("--once", "--address", wire.address) == 0
    text = capsys.readouterr().out
    (router,) = [line for line in text.splitlines() if line.startswith("router ")][1:]
    median = float(router.split()[4].split("/")[0])
    assert 11.0 <= median <= 40.0
    assert "engine-a" in text
    assert "engine-b" in text


def test_away_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--once", "--address", "127.0.0.1:1") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headway: nobody answers at 127.0.0.1:1")
    assert captured.err.count("\n") == 1
    assert top("--interval", "0", "--address", "127.0.0.1:1") == 2


def test_a_pipe_gets_one_view_after_the_other_until_ctrl_c(wire: Wire) -> None:
    with spawn("--interval", "0.1", "--address", wire.address) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        heads = 0
        for line in process.stdout:
            heads += line.startswith(b"headway ")
            if heads == 3:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr.read() == b""


def test_a_terminal_is_left_as_it_was(wire: Wire) -> None:
    """And a router that goes away is told of, in the view."""
    main, child = pty.openpty()
    heard = bytearray()

    def listen() -> None:
        while True:
            try:
                heard.extend(os.read(main, 4096))
            except OSError:
                return

    with spawn(
        "--interval", "0.1", "--timeout", "1", "--address", wire.address, stdout=child
    ) as top:
        os.close(child)
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        deadline = time.monotonic() + 20
        while heard.count(b"engine-a") < 2:
            assert time.monotonic() < deadline, bytes(heard)
            time.sleep(0.05)
        top.send_signal(signal.SIGINT)
        assert top.wait(10) == 0
        assert top.stderr is not None
        assert top.stderr.read() == b""
    listener.join(5)
    os.close(main)
    # Out of the other screen, and the cursor is back.
    assert b"\x1b[?1049l" in heard
    assert heard.rindex(b"\x1b[?25h") > heard.rindex(b"\x1b[?25l")
