"""Locust itself: distributed over processes, with the exit code that a pipeline reads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load.mock import ROOT, mock_server

# Not imported: gevent would patch this process, and every grpc.aio test after it would hang.
if importlib.util.find_spec("locust") is None:
    pytest.skip("needs the extra `load`", allow_module_level=True)


def _locust(tmp_path: Path, address: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests/locustfile.py")),
        *("--host", address, "--headless", "--only-summary"),
        *("--arrivals", "constant:20", "--requests", "30", "--output-mean", "20"),
        *("--out", str(tmp_path / "out"), "--max-send-lag", "5000", *args),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )


def test_two_workers_make_one_exact_result(tmp_path):
    with mock_server(tmp_path) as mock:
        done = _locust(tmp_path, mock.address, "--processes", "2", "--max-wire-lag", "5000")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("TTFT", "TPOT", "ITL", "longest gap", "queue time", "preemptions", "resumes"):
        assert row in done.stderr + done.stdout
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert len(summary["children"]) == 2
    assert summary["counts"]["sent"] == mock.ledger["requests"] == 30
    assert summary["counts"]["tokens"] == mock.ledger["tokens"]
    assert len((tmp_path / "out/requests.jsonl").read_text().splitlines()) == 30
    assert "objectives met" in (tmp_path / "out/report.html").read_text()


def test_an_invalid_run_exits_4(tmp_path):
    with mock_server(tmp_path) as mock:
        done = _locust(tmp_path, mock.address, "--max-wire-lag", "0")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "INVALID" in done.stdout
