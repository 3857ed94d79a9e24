"""The step loop, in a thread of its own: commands in, reports out, one step after the other.

With an executor that allows it, a step is planned while the one before runs.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cluster.core.load import EngineLoad
from cluster.core.request import EngineRequest
from cluster.engine.core import (
    ConnectionId,
    EngineCore,
    StepReport,
    StreamFailure,
    StreamKey,
)
from cluster.engine.executor import Executor, PendingStep

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Submit:
    key: StreamKey
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    key: StreamKey


@dataclass(frozen=True, slots=True)
class Pause:
    key: StreamKey


@dataclass(frozen=True, slots=True)
class Resume:
    key: StreamKey


@dataclass(frozen=True, slots=True)
class DropConnection:
    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class GiveAway:
    """Abort every stream, and tell whoever reads it why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class StepObserver(Protocol):
    """Measures."""

    def stepped(self, elapsed_s: float) -> None:
        """A step took so long on the executor. Called in the loop's thread; must be quick."""


class NoObserver:
    """Nobody measures."""

    def stepped(self, elapsed_s: float) -> None: ...


NO_OBSERVER = NoObserver()


class ExecutorLost(RuntimeError):
    """The executor reported that it cannot go on."""


Command: TypeAlias = Submit | Abort | Pause | Resume | DropConnection | GiveAway | Stop


class EngineLoop:
    """Owns the engine core and the executor; everybody else talks to it through post().

    publish is called in the loop's thread, once per step and per refusal; it must not block.
    on_death is called once, if a step raises or the executor breaks down: KV contents are then
    unknown, so the engine is over and its streams are replayed elsewhere. It comes from the loop's
    thread, or from that of poll_executor().
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        publish: Callable[[StepReport], None],
        on_death: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        observer: StepObserver = NO_OBSERVER,
    ) -> None:
        self._core = core
        self._observer = observer
        self._executor = executor
        self._publish = publish
        self._on_death = on_death
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._under_way: deque[PendingStep] = deque()
        self._busy_since: float | None = None
        self._dying = threading.Lock()
        self.failure: BaseException | None = None
        self.load: EngineLoad = core.load(clock())
        """Newest load; replaced whole, so any thread may read it."""
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next plan. Thread-safe."""
        self._inbox.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the step under way; streams still open get nothing more."""
        self.post(Stop())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("engine loop did not end within %.0f s", timeout_s)
        else:
            self._executor.close()

    def poll_executor(self) -> None:
        """Notice an executor that broke down with no step to tell of it, or in a step that hangs.
        Thread-safe; to be called every moment."""
        problem = self._executor.problem()
        if problem is not None:
            self._die(ExecutorLost(problem))

    def stalled_for(self) -> float:
        """Seconds since work has been present without a step getting done; 0 when all is well."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def _run(self) -> None:
        # What is loaded by now stays: no collection need ever look at it again.
        gc.collect()
        gc.freeze()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        with self._dying:
            if self.failure is not None or self._stopping:
                return
            self.failure = error
        logger.error("engine loop died at step %d", self.load.step, exc_info=error)
        self._on_death(error)

    def _turn(self) -> None:
        self._drain_inbox()
        if self._stopping:
            return
        self._busy_since = self._busy_since or self._clock()
        if self._fill_pipeline():
            self._take_result()
            return
        self._busy_since = None
        self.load = self._core.load(self._clock())
        self._wait_for_command()

    def _fill_pipeline(self) -> bool:
        """Submit what may be submitted before the next result. False if nothing is under way."""
        while len(self._under_way) < self._executor.pipeline_depth:
            plan = self._core.begin_step(self._clock())
            if plan is None:
                break
            self._under_way.append(self._executor.submit(plan))
        return bool(self._under_way)

    def _take_result(self) -> None:
        result = self._under_way.popleft().wait()
        self._observer.stepped(result.elapsed_s)
        report = self._core.complete_step(result, self._clock())
        self._busy_since = None
        self.load = report.load
        self._publish(report)

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._apply(command)

    def _wait_for_command(self) -> None:
        wait_s = IDLE_WAIT_S
        if self._core.next_wake_s is not None:
            wait_s = min(wait_s, max(0.0, self._core.next_wake_s - self._clock()))
        try:
            self._apply(self._inbox.get(timeout=wait_s))
        except queue.Empty:
            return

    def _apply(self, command: Command) -> None:
        if isinstance(command, Submit):
            refusal = self._core.submit(command.key, command.request, self._clock())
            if refusal is not None:
                self._tell([refusal])
        elif isinstance(command, Abort):
            self._core.abort(command.key)
        elif isinstance(command, Pause):
            self._core.pause(command.key)
        elif isinstance(command, Resume):
            self._core.resume(command.key)
        elif isinstance(command, DropConnection):
            self._core.drop_connection(command.connection)
        elif isinstance(command, GiveAway):
            self._tell(self._core.give_away(command.reason))
        else:
            self._stopping = True

    def _tell(self, failures: list[StreamFailure]) -> None:
        self._publish(StepReport(self._core.load(self._clock()), [], failures))
