"""The mock server as a process, and runs against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Mock:
    """address: HOST:PORT. ledger: what it really sent; filled when it has ended."""

    address: str
    ledger: dict[str, Any] = field(default_factory=dict)


@contextmanager
def mock_server(tmp_path: Path, *args: str) -> Iterator[Mock]:
    path = tmp_path / "ledger.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtests.mockserver", "--ledger", str(path), *args],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"},
    )
    try:
        assert process.stdout is not None
        mock = Mock(f"127.0.0.1:{json.loads(process.stdout.readline())['port']}")
        yield mock
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        mock.ledger.update(json.loads(path.read_text()))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(5)
        if process.stdout is not None:
            process.stdout.close()
