"""`headway serve` as a process of its own, for experiments that compare how it is configured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from cluster.core.errors import HeadwayError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


class ServeFailed(HeadwayError):
    """The server did not get ready; the message has its last words."""


class Served:
    """Context manager: ready on entry at `address` (loopback), gone on exit.

    options: what follows `headway serve`. Ray picks its ports itself, so other clusters on the
    machine stay alone.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._command = [sys.executable, "-m", "cluster", "serve", "--address", self.address]
        self._command += options
        self._lines: list[str] = []

    def __enter__(self) -> Served:
        # Without this a terminated experiment would leave a whole cluster behind.
        self._before = signal.signal(signal.SIGTERM, _exit_in_order)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            # Ctrl-C of the experiment must not reach it before the experiment has ended.
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        signal.signal(signal.SIGTERM, self._before)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any("] ready:" in line for line in self._lines):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = " / ".join(self._lines[-5:])
                raise ServeFailed(f"headway serve did not start: {said}")
            time.sleep(0.1)

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            self._lines.extend(line.rstrip() for line in stdout)


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
