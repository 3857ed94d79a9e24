"""The other ranks of a group as their leader, rank 0, sees them: started, fed, watched, ended."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cluster.core.errors import ConfigError, HeadwayError, WireError
from cluster.core.owntime import OwnTime
from cluster.core.plan import StepPlan
from workers.parallel.collectives import GroupBroken
from workers.parallel.frames import (
    Beat,
    Channel,
    Failed,
    FromRank,
    Hello,
    Loading,
    Ready,
    Run,
    Setup,
)

logger = logging.getLogger(__name__)

ARRIVAL_S = 60.0
"""A rank's process must have come up by then; placed on a full cluster it would never."""
SILENCE_S = 4.0
"""A rank that gives no sign of life for so long is taken for dead."""
_HELLO_S = 10.0
_TICK_S = 0.25


class RankHandle(Protocol):
    """A started process."""

    def kill(self) -> None:
        """End it at once, even if it hangs. Idempotent."""


RankLauncher = Callable[[str, int], RankHandle]
"""Starts `workers.parallel.rank.serve_rank(path, rank)` in a process of its own on this machine."""


class _Member:
    """One rank other than the leader."""

    def __init__(self, rank: int, pid: int, connection: socket.socket) -> None:
        self.rank, self.pid = rank, pid
        self.connection = connection
        self.channel: Channel[FromRank] = Channel(connection, FromRank)
        self.silent_s = 0.0
        self.weight_bytes: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class Crew:
    """Ranks 1 to size - 1. One's death is the end of all: the first problem is kept, told to
    `on_broken` and ends the others."""

    def __init__(
        self, setup: Setup, memory: int | None, launch: RankLauncher, on_broken: Callable[[], None]
    ) -> None:
        """Start the ranks and send them off to load. memory: descriptor that goes with a "shm"
        setup. Raises ConfigError when a rank does not come up."""
        self._setup = setup
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._problem: Failed | None = None
        self._closing = threading.Event()
        self._handles: list[RankHandle] = []
        self._members: list[_Member] = []
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))
        try:
            self._gather(launch, memory)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._threads = [
            threading.Thread(target=self._listen, args=(m,), name=f"{m}", daemon=True)
            for m in self._members
        ]
        self._threads.append(threading.Thread(target=self._watch, name="rank-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    def await_ready(self) -> int:
        """Until all ranks have loaded; their weights' bytes, summed.

        Raises ConfigError for a model or setting that a rank refuses, GroupBroken for its death.
        """
        with self._changed:
            while self._problem is None and any(m.weight_bytes is None for m in self._members):
                self._changed.wait()
        self.check()
        return sum(m.weight_bytes or 0 for m in self._members)

    def run(self, plan: StepPlan) -> None:
        """Send all ranks a plan. Raises GroupBroken when one is gone."""
        self.check()
        message = Run(plan)
        for member in self._members:
            try:
                member.channel.send(message)
            except OSError as error:
                self._break(f"{member} is gone: {error}")
        self.check()

    def check(self) -> None:
        """Raise GroupBroken (ConfigError while loading) if a rank is lost."""
        problem = self._problem
        if problem is None:
            return
        raise ConfigError(problem.reason) if problem.bad_setup else GroupBroken(problem.reason)

    def problem(self) -> str | None:
        """Why the group is of no use any more; None when all is well. From any thread."""
        return None if self._problem is None else self._problem.reason

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self._closing.set()
        for member in self._members:
            member.channel.close()
        for handle in self._handles:
            handle.kill()

    # -- start ---------------------------------------------------------------------------------

    def _gather(self, launch: RankLauncher, memory: int | None) -> None:
        path = str(self._folder / "leader.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(self._setup.size)
            for rank in range(1, self._setup.size):
                self._handles.append(launch(path, rank))
            deadline = time.monotonic() + ARRIVAL_S
            missing = set(range(1, self._setup.size))
            while missing:
                member = self._accept(listener, deadline, missing)
                missing.discard(member.rank)
                self._members.append(member)
                member.channel.send(self._setup)
                if memory is not None:
                    socket.send_fds(member.connection, [b"m"], [memory])

    @staticmethod
    def _accept(listener: socket.socket, deadline: float, missing: set[int]) -> _Member:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise ConfigError(
                f"tensor_parallel_size: ranks {sorted(missing)} did not come up within "
                f"{ARRIVAL_S:.0f} s; are there resources left for their processes on this node?"
            ) from error
        connection.settimeout(_HELLO_S)
        hello = Channel[FromRank](connection, FromRank).receive()
        connection.settimeout(None)
        if not isinstance(hello, Hello) or hello.rank not in missing:
            connection.close()
            raise WireError(f"a rank of {sorted(missing)} was expected, got {hello!r}")
        return _Member(hello.rank, hello.pid, connection)

    # -- watch ---------------------------------------------------------------------------------

    def _listen(self, member: _Member) -> None:
        try:
            while (message := member.channel.receive()) is not None:
                self._take(member, message)
        except HeadwayError as error:
            self._break(f"{member}: {error}")
            return
        self._break(f"{member} has ended")

    def _take(self, member: _Member, message: FromRank) -> None:
        member.silent_s = 0.0
        if isinstance(message, Failed):
            self._break(f"{member}: {message.reason}", bad_setup=message.bad_setup)
        elif isinstance(message, Ready):
            with self._changed:
                member.weight_bytes = message.weight_bytes
                self._changed.notify_all()
        elif isinstance(message, Loading):
            logger.debug("%s: %s %.0f%%", member, message.stage, 100 * message.share)
        elif not isinstance(message, Beat):
            self._break(f"{member} sent {message!r}")

    def _watch(self) -> None:
        own = OwnTime(_TICK_S, time.monotonic())
        while not self._closing.wait(_TICK_S) and self._problem is None:
            passed = own.passed(time.monotonic())
            for member in self._members:
                member.silent_s += passed
                if member.silent_s > SILENCE_S:
                    self._break(f"{member} has given no sign of life for {SILENCE_S:g} s")
                    break

    def _break(self, reason: str, bad_setup: bool = False) -> None:
        with self._changed:
            if self._problem is not None or self._closing.is_set():
                return
            self._problem = Failed(reason, bad_setup)
            self._changed.notify_all()
        logger.error("tensor-parallel group lost: %s", reason)
        self._on_broken()
        for handle in self._handles:
            handle.kill()
