"""Starts ranks as child processes, for engines that run without Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import torch

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankProcess:
    """A child process that serves one rank."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        # It is dead or about to be; a zombie must not stay until this process ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)


def launch_process(path: str, rank: int) -> RankProcess:
    """A RankLauncher. On GPUs, rank r takes the r-th of those that this process may use."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if torch.cuda.is_available():
        own = environment.get(_VISIBLE)
        devices = own.split(",") if own else [str(i) for i in range(torch.cuda.device_count())]
        environment[_VISIBLE] = devices[rank] if rank < len(devices) else ""
    command = [sys.executable, "-m", "workers.parallel", path, str(rank)]
    # Not a new session: what a terminal sends to the engine (Ctrl-C) reaches its ranks as well.
    return RankProcess(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
