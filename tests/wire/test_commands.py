"""The commands as a shell runs them: output, exit codes, Ctrl-C, closed pipes."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import chat, generate, status
from cluster.core.errors import Unavailable
from cluster.text.tokenizer import Tokenizer
from headway.types import Engine, Status
from tests.unit.text.text_folders import byte_fallback_folder
from tests.wire.live import live_gateway
from tests.wire.wire_support import Script, Wire

ROOT = Path(__file__).resolve().parents[2]
DRIVER = (
    "import argparse, signal, sys\n"
    # A suite in the background of a shell is started with SIGINT ignored, and children inherit it.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from cluster.commands import chat, generate, status\n"
    "parser = argparse.ArgumentParser('headway')\n"
    "commands = parser.add_subparsers(required=True)\n"
    "for command in (chat, generate, status):\n"
    "    command.add_parser(commands)\n"
    "args = parser.parse_args()\n"
    "sys.exit(args.run(args))\n"
)


def headway(*arguments: str) -> int:
    """The exit code of the command, run in this process."""
    parser = argparse.ArgumentParser("headway")
    commands = parser.add_subparsers(required=True)
    for command in (generate, chat, status):
        command.add_parser(commands)
    args = parser.parse_args(arguments)
    code: int = args.run(args)
    return code


class Spawned(subprocess.Popen[str]):
    """Does not outlive a test that fails, which would wait for it instead of saying why."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def spawn(*arguments: str, **options: Any) -> Spawned:
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'proto'}", PYTHONUNBUFFERED="1")
    return Spawned(
        [sys.executable, "-c", DRIVER, *arguments],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


@pytest.fixture
def wire(tokenizer: Tokenizer) -> Iterator[Wire]:
    ids = [*tokenizer.encode("Hello 안녕!"), *tokenizer.eos_token_ids]
    with live_gateway(tokenizer, Script(ids)) as running:
        yield running


def prompt_text(wire: Wire, number: int = 0) -> str:
    return wire.tokenizer.decode(wire.source.opened[number].request.prompt_ids)


def test_generate_streams_text(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("generate", "--address", wire.address, "hi", "--system", "Be brief.") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("Hello 안녕!\n", "")
    assert prompt_text(wire) == "system\nBe brief.\nuser\nhi\nassistant\n"


def test_generate_raw_with_sampling(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--raw", "--max-tokens", "5", "--min-tokens", "1", "--temperature", "0.5"]
    options += ["--top-k", "9", "--top-p", "0.9", "--min-p", "0.1", "--seed", "11"]
    options += ["--stop", "x", "--stop", "y", "--stop-token-ids", "300", "--ignore-eos"]
    assert headway("generate", "--address", wire.address, *options, "hi") == 0
    sampling = wire.source.opened[0].request.sampling
    assert prompt_text(wire) == "hi"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (5, 1, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (9, 0.9, 0.1, 11)
    assert sampling.stop_token_ids == (300,)


def test_generate_json_lines(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("generate", "--address", wire.address, "--json", "hi") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["event"] == "accepted"
    assert events[-1]["event"] == "finished"
    assert "".join(e["text"] for e in events if e["event"] == "delta") == "Hello 안녕!"


def test_generate_prints_several_answers_apart(
    wire: Wire, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--address", wire.address, "--n", "3", "--seed", "1"]
    assert headway("generate", *options, "hi") == 0
    answers = [f"--- {number} of 3 ---\nHello 안녕!\n" for number in (1, 2, 3)]
    assert capsys.readouterr().out == "".join(answers)
    assert headway("generate", *options, "--json", "hi") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {e["choice"] for e in events if e["event"] == "delta"} == {0, 1, 2}
    assert headway("generate", *options, "--n", "17", "hi") == 2
    assert "between 1 and 16, got 17" in capsys.readouterr().err


def test_generate_reads_standard_input(wire: Wire) -> None:
    with spawn("generate", "--address", wire.address, "--raw", "-") as process:
        out, err = process.communicate("from a pipe", timeout=20)
    assert (process.returncode, out, err) == (0, "Hello 안녕!\n", "")
    assert prompt_text(wire) == "from a pipe"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--temperature", "nan"], 2, "sampling.temperature"),
        (["--seed", "-1"], 2, "cannot be sent"),
        (["--model", "other"], 2, "other"),
        (["--raw", "--system", "x"], 2, "--system"),
        (["--api-key-file", "/nonexistent"], 2, "/nonexistent"),
        (["--timeout", "inf"], 2, "timeout_s must be"),
    ],
)
def test_errors_are_one_line_and_a_code(
    wire: Wire, capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
) -> None:
    assert headway("generate", "--address", wire.address, "hi", *options) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headway: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["status"]])
@pytest.mark.parametrize(
    ("address", "cause"), [("127.0.0.1:1", "Connection refused"), ("nowhere.invalid:1", "")]
)
def test_nobody_answers(
    capsys: pytest.CaptureFixture[str], command: list[str], address: str, cause: str
) -> None:
    assert headway(*command, "--address", address) == 1
    out, err = capsys.readouterr()
    assert out == ""
    question = f"headway: nobody answers at {address}; is `headway serve` running there? ({cause}"
    assert err.startswith(question)
    assert err.endswith(")\n")
    assert len(err) < len(question) + 80


def test_a_server_error_in_mid_stream(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    wire.source.script.error = Unavailable("no engine is left")
    wire.source.script.error_after = 3
    options = ["--address", wire.address, "--resume-window", "0.3"]
    assert headway("generate", *options, "hi") == 1
    assert "no engine is left" in capsys.readouterr().err
    assert len(wire.source.opened) > 1, "it was not tried again within the window"


def test_a_model_without_template_takes_the_prompt_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_folder(byte_fallback_folder(tmp_path / "model"))
    with live_gateway(tokenizer, Script(tokenizer.encode("yes"))) as wire:
        limit = ["--address", wire.address, "--max-tokens", "2"]
        assert headway("generate", *limit, "hi") == 0
        assert tuple(tokenizer.encode("hi")) == wire.source.opened[0].request.prompt_ids
        assert headway("generate", *limit, "--chat", "hi") == 2
        assert headway("chat", *limit) == 2
        assert "no chat template" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet(wire: Wire) -> None:
    wire.source.script.ids = wire.tokenizer.encode("abc ")
    wire.source.script.step_s = 0.005
    with spawn("generate", "--address", wire.address, "hi") as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "ab"
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_chat_keeps_the_history(wire: Wire) -> None:
    lines = "first\n\nsecond\n/clear\nthird\n/exit\nnever\n"
    with spawn("chat", "--address", wire.address, "--system", "S") as process:
        out, err = process.communicate(lines, timeout=20)
    assert (process.returncode, err) == (0, "")
    assert out.count("Hello 안녕!") == 3
    assert prompt_text(wire, 1) == (
        "system\nS\nuser\nfirst\nassistant\nHello 안녕!\nuser\nsecond\nassistant\n"
    )
    assert prompt_text(wire, 2) == "system\nS\nuser\nthird\nassistant\n"
    assert len(wire.source.opened) == 3


def test_chat_goes_on_after_an_error(wire: Wire) -> None:
    wire.source.open_error = Unavailable("no engine is connected")
    with spawn("chat", "--address", wire.address) as process:
        _, err = process.communicate("hi\n", timeout=20)
    assert process.returncode == 0
    assert f"headway: {wire.address}: no engine is connected" in err


def test_interrupt_stops_only_the_running_answer(wire: Wire) -> None:
    wire.source.script.ids = wire.tokenizer.encode("abc ")
    wire.source.script.step_s = 0.01
    with spawn("chat", "--address", wire.address, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hi\n")
        process.stdin.flush()
        read = ""
        while not read.endswith("abc abc"):
            letter = process.stdout.read(1)
            assert letter, "the command ended"
            read += letter
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 5
        while wire.source.open_streams:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        wire.source.script.ids = [*wire.tokenizer.encode("done"), *wire.tokenizer.eos_token_ids]
        out, err = process.communicate("again\n/exit\n", timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "done" in out
    # What was shown of the interrupted answer stays in the history.
    assert "assistant\nabc abc" in prompt_text(wire, 1)


def test_interrupt_of_generate(wire: Wire) -> None:
    wire.source.script.ids = wire.tokenizer.encode("abc ")
    wire.source.script.step_s = 0.01
    with spawn("generate", "--address", wire.address, "x", start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")


def test_status(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway("status", "--address", wire.address) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("engine-a", "60/64", "tiny", "ready"))
    assert headway("status", "--address", wire.address, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [engine["engine_id"] for engine in answer["engines"]] == ["engine-a", "engine-b"]
    assert headway("status", "--address", wire.address, "--interval", "0") == 2


@pytest.mark.parametrize(
    "address", ["127.0.0.1:37243", "192.168.100.200:37243", "[2001:db8::1234:5678]:37243"]
)
def test_status_keeps_addresses_whole_at_80_columns(address: str) -> None:
    from rich.console import Console

    busy = Engine(
        engine_id="engine-1a2b3c4d",
        address=address,
        epoch=3,
        connected=True,
        blocks_total=65536,
        blocks_free=65000,
        running=256,
        waiting=1024,
        step=17,
        tokens_per_s=12345.6,
        preemptions=1000,
        frame_age_s=0.05,
    )
    fleet = Status("1.0", 12.0, 3, True, None, (busy,))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status.render(fleet))
    (row,) = [line for line in console.export_text().splitlines() if "37243" in line]
    assert f" {address} " in row
    assert row.startswith("eng")
    assert all(word in row for word in ("65000/65536", "256", "1024", "12345.6", "0.05 s"))


def test_interrupts_arrive_where_the_suite_ignores_them(wire: Wire) -> None:
    options = ["--json", "--watch", "--interval", "0.05"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = spawn("status", "--address", wire.address, *options, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 130


def test_status_watch_until_interrupted(wire: Wire) -> None:
    options = ["--json", "--watch", "--interval", "0.05"]
    with spawn("status", "--address", wire.address, *options, start_new_session=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert lines[1]["uptime_s"] > lines[0]["uptime_s"]
    assert (process.returncode, err) == (130, "")


def test_the_address_comes_from_the_environment(wire: Wire) -> None:
    environment = dict(os.environ, HEADWAY_ADDRESS=wire.address, PYTHONPATH=f"{ROOT}:{ROOT}/proto")
    command = [sys.executable, "-c", DRIVER, "generate", "hi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "Hello 안녕!\n")


def test_commands_start_without_the_heavy_parts() -> None:
    code = (
        "import sys\n"
        "from cluster.commands import chat, generate, status\n"
        "import headway.client\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'tokenizers', 'rich', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'proto'}")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
