"""`headway loadtest run` and `compare`, and the adapter for other servers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from cluster.commands import loadtest
from cluster.core.errors import ConfigError
from loadtests.compare import Run, compare
from tests.load.mock import mock_server
from tests.load.openai_server import openai_server

FAST = ["--requests", "30", "--arrivals", "constant:30", "--output-mean", "20", "--output-cv", "0"]
LOOSE = ["--max-send-lag", "5000", "--max-wire-lag", "5000"]


def headway(*args: str) -> int:
    parser = argparse.ArgumentParser()
    loadtest.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["loadtest", *args])
    return int(parsed.run(parsed))


def _run(address: str, out: Path, *args: str) -> int:
    return headway("run", "--address", address, "--out", str(out), *FAST, *LOOSE, *args)


def test_runs_are_judged_written_and_compared(tmp_path, capsys):
    with mock_server(tmp_path, "--gap-ms", "4") as mock:
        assert _run(mock.address, tmp_path / "a") == 0
    with mock_server(tmp_path, "--gap-ms", "12") as mock:
        assert _run(mock.address, tmp_path / "b", "--tenants", "3") == 0
    said = capsys.readouterr().out
    assert "valid, objectives met" in said
    assert "TPOT" in said
    page = (tmp_path / "b/report.html").read_text()
    assert "tenant 2" in page
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert headway("compare", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    said = capsys.readouterr().out
    assert "the loads differ" in said
    assert "TPOT P50" in said
    rows = {row.name: row for row in compare(Run.read(tmp_path / "a"), Run.read(tmp_path / "b"))}
    assert rows["TPOT P50"].certain
    assert rows["TPOT P50"].ratio == pytest.approx(3.0, rel=0.3)
    with pytest.raises(ConfigError, match="no result"):
        Run.read(tmp_path)


def test_a_bad_objective_is_refused_before_the_load():
    with pytest.raises(ConfigError, match="no objectives"):
        headway("run", "--address", "127.0.0.1:1", "--slo", "nix")


# -- the adapter for other servers ---------------------------------------------------------------


def test_another_server_is_driven_with_the_same_schedule(tmp_path):
    with openai_server() as url:
        out = tmp_path / "peer"
        code = _run(url, out, "--target", "openai", "--model", "any", "--warmup", "0.1")
    assert code == 3
    summary = json.loads((out / "summary.json").read_text())
    assert summary["errors"] == {"HTTP_503": 1, "BAD_EVENT": 1}
    assert summary["counts"]["sent"] == 30
    assert summary["counts"]["tokens"] == 28 * 20
    assert summary["latencies_ms"]["TPOT"]["p50"] == pytest.approx(5, rel=0.5)
    with pytest.raises(Exception, match="--model"):
        _run("127.0.0.1:1", out, "--target", "openai")
