"""Every command of the documentation is run, or at least known; what is shown of it is true."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import cli
from tests.docs.pages import ROOT, Command, commands, programs
from tests.docs.ways import TABLE, Row, Way, argv, row_of, words

ALL = list(dict.fromkeys(commands()))
OPTIONAL = re.compile(r"^(\.\.\.|[A-Z_]+)$")


def of(*ways: Way) -> list[Command]:
    return [c for c in ALL if (row := row_of(c.text)) is not None and row.way in ways]


def row(command: Command) -> Row:
    found = row_of(command.text)
    assert found is not None
    return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what an operator has made by then."""
    shutil.copy(ROOT / "deploy" / "headway.toml", tmp_path / "headway.toml")
    shutil.copy(ROOT / "deploy" / "headway.toml", tmp_path / "my-headway.toml")
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return tmp_path


def test_every_command_is_in_the_table():
    unknown = [str(c) for c in ALL if row_of(c.text) is None]
    assert not unknown, f"say in tests/docs/ways.py what is done with them: {unknown}"
    assert len(ALL) > 50


def test_every_row_is_of_use():
    used = {row_of(c.text) for c in ALL}
    idle = [r.begins for r in TABLE if r not in used]
    assert set(idle) <= {"headway serve", "headway config show"}


@pytest.mark.parametrize("command", ["headway frobnicate", "rm -rf /", "headway planning"])
def test_what_nobody_knows_is_in_no_row(command):
    assert row_of(command) is None


def test_what_is_not_run_says_why():
    assert [r.begins for r in TABLE if r.way not in (Way.RUN, Way.SERVED) and not r.why] == []


@pytest.mark.parametrize("command", of(Way.RUN), ids=str)
def test_run(command: Command, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = row(command)
    shown = command.output
    more = "" if shown is not None else how.more
    code = cli.main([*argv(command.text), *more.split()])
    printed = capsys.readouterr()
    assert code in how.codes, printed.err
    if shown is not None:
        assert condensed(printed.out) == condensed(shown.text), "python -m tests.docs writes it"


@pytest.mark.parametrize("command", of(Way.SERVED), ids=str)
def test_served(
    command: Command,
    address: str,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADWAY_ADDRESS", address)
    how, arguments = row(command), argv(command.text)
    if arguments[0] == "loadtest":
        pytest.importorskip("hdrh", reason="needs the extra `load`")
        arguments += ["--address", address, "--out", str(desk / "run")]
    code = cli.main([*arguments, *how.more.split()])
    assert code in how.codes, capsys.readouterr().err


@pytest.mark.parametrize("command", of(Way.PARSED), ids=str)
def test_parsed(command: Command) -> None:
    cli.build_parser().parse_args([a.replace("...", "x") for a in argv(command.text)])


@pytest.mark.parametrize("command", of(Way.MADE), ids=str)
def test_made(command: Command) -> None:
    done = subprocess.run(
        ["make", "-n", *words(command.text)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # What goes to `headway` through ARGS has to be known there.
    for line in done.stdout.splitlines():
        if "headway serve " in line:
            cli.build_parser().parse_args(argv(line.replace("exec ", "")))


@pytest.mark.parametrize("command", of(Way.SHELL), ids=str)
def test_shell(command: Command) -> None:
    subprocess.run(["bash", "-n", "-c", command.text], check=True)
    for word in words(command.text):
        if re.match(r"(deploy|loadtests|docs|tests)/", word):
            assert (ROOT / word).exists(), f"{word} is not there"
    program = words(command.text)[0]
    if program.startswith("deploy/"):
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)


@pytest.mark.parametrize("program", programs(), ids=lambda b: f"{b.page.name}:{b.start}")
def test_program(program, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples in Python, against the same router."""
    assert "127.0.0.1:50051" in program.text
    exec(compile(program.text.replace("127.0.0.1:50051", address), str(program.page), "exec"), {})
    assert capsys.readouterr().out


def condensed(output: str) -> list[str]:
    """Lines without what only makes room."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in output.splitlines()]
    return [line for line in lines if line]
