"""`headway serve` as a user starts it: a process of its own, watched from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import psutil

from headway.client import Client

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class App:
    """command: what to run, with `{address}` where the address goes."""

    command: list[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.family: dict[int, psutil.Process] = {}

    def start(self) -> App:
        command = [part.format(address=self.address) for part in self.command]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for("ready:", START_TIMEOUT_S)
        self.remember_family()
        return self

    def wait_for(self, needle: str, timeout_s: float) -> None:
        """Until a line that it printed has this in it. Ends it if that never comes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(needle in line for line in self.lines):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        said = "\n".join(self.lines[-40:])
        self._kill_rest()
        raise AssertionError(f"no {needle!r} within {timeout_s:.0f} s; it said:\n{said}")

    def client(self) -> Client:
        return Client(self.address)

    def remember_family(self) -> None:
        """Note every process that the application has, to look for them after its end."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Live replica processes of "Engine" or "Router"."""
        return self.processes(f"ray::ServeReplica:headway:{deployment}")

    def processes(self, title: str) -> list[psutil.Process]:
        """Live processes of the application whose title begins so."""
        self.remember_family()
        return [p for p in self.family.values() if _title(p).startswith(title)]

    def until_replaced(self, victim: psutil.Process, title: str, within_s: float = 60.0) -> None:
        """Wait until this process is gone and another of its title is there."""
        _, alive = psutil.wait_procs([victim], timeout=within_s)
        assert not alive, f"{victim} is still there"
        deadline = time.monotonic() + within_s
        known = set(self.family.values())
        while all(p in known for p in self.processes(title)):
            assert time.monotonic() < deadline, f"no {title} came for {victim}"
            time.sleep(0.2)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Signal the whole foreground group, as a terminal's Ctrl-C does; returns the exit code."""
        self.remember_family()
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self._kill_rest()

    def survivors(self, within_s: float = 10.0) -> list[str]:
        """Processes that outlived the application by `within_s` seconds."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=within_s)
        return [_title(p) for p in alive if _title(p)]

    def _kill_rest(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())


def headway(*args: str) -> list[str]:
    """A `headway` command line in this interpreter's environment."""
    return [sys.executable, "-m", "cluster", *args]


def _title(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""
