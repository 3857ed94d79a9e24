"""The engine's side of the hop: takes routers in, turns step reports into their frames."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from dataclasses import dataclass

from cluster.core.errors import InvalidRequest, WireError
from cluster.core.load import EngineLoad
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder
from cluster.core.request import EngineRequest
from cluster.engine import loop as commands
from cluster.engine.core import ConnectionId, StepReport, StreamKey
from cluster.engine.loop import EngineLoop
from cluster.hop import codec
from cluster.hop.keeper import LogKeeper
from cluster.hop.messages import (
    EMPTIED,
    PROTOCOL_VERSION,
    RESUMED_ELSEWHERE,
    Abort,
    Adopt,
    Adopted,
    Drain,
    Failure,
    Forget,
    Frame,
    Goodbye,
    Hello,
    Pause,
    Resume,
    Submit,
    Tokens,
    Up,
    WaitingPart,
    Welcome,
)
from cluster.listen import listen_near

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.2
HELLO_TIMEOUT_S = 5.0
MAX_UNREAD_BYTES = 32 << 20
"""A router that leaves this much unread is stuck; its connection is cut and its streams freed."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who this engine is to routers. secret: shared by the cluster's routers and engines."""

    engine_id: str
    epoch: int
    secret: str
    model: ModelInfo
    max_sequence_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class _Connection:
    """One router. Frames for it are written without waiting: the loop must not be slowed down."""

    def __init__(self, number: ConnectionId, router_id: str, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.router_id = router_id
        self.seen = 0
        self.last_sent_s = 0.0
        self._writer = writer

    def send(self, frame: Frame | Adopted, now: float) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            logger.error("router %s does not read its frames; connection cut", self.router_id)
            transport.abort()
            return
        self._writer.write(codec.encode(frame))
        self.last_sent_s = now

    def close(self, reason: str) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(codec.encode(Goodbye(reason)))
        self._writer.close()


class HopServer:
    """Listens for routers. All methods but publish() belong to one asyncio loop."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self._connections: dict[ConnectionId, _Connection] = {}
        self._next_connection = 1
        self._keeper = LogKeeper()
        self.draining = False
        """Told to the routers with every frame."""
        self.metrics_port = 0
        """Told to routers that connect; 0 where nothing is measured."""
        self._engine: EngineLoop | None = None
        self._server: asyncio.Server | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, engine: EngineLoop, host: str, port: int = 0) -> int:
        """Listen at `port` or the next free one; returns it. The engine loop may already run."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._server = await listen_near(self._serve, host, port)
        self._heartbeat = asyncio.create_task(self._beat())
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, reason: str) -> None:
        """Say goodbye to every router and close. Their streams go on elsewhere."""
        if self._server is not None:
            self._server.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
            self._heartbeat = None
        for connection in list(self._connections.values()):
            connection.close(reason)

    def abandon(self, reason: str) -> None:
        """Like stop(), from any thread: the engine is dead, routers must know now."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self.stop(reason)))

    def publish(self, report: StepReport) -> None:
        """Called by the engine loop's thread after each step."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, report)

    def drain(self, undo: bool = False) -> None:
        """Tell all routers, with the next frames, to send nothing new."""
        if self.draining is undo:
            logger.info("%s", "takes work again" if undo else "draining: takes nothing new")
        self.draining = not undo

    @property
    def routers(self) -> list[str]:
        return [c.router_id for c in self._connections.values()]

    # -- down ----------------------------------------------------------------------------------

    def _distribute(self, report: StepReport) -> None:
        tokens: dict[ConnectionId, list[Tokens]] = {}
        for key, first_index, ids, finish, stats in report.tokens:
            scores = report.scores.get(key)
            part = Tokens(key.stream, first_index, ids, finish, stats, scores)
            self._keeper.extend(key, ids, finish, scores)
            tokens.setdefault(key.connection, []).append(part)
        failures: dict[ConnectionId, list[Failure]] = {}
        for key, reason, invalid in report.failures:
            self._keeper.drop(key)
            failures.setdefault(key.connection, []).append(Failure(key.stream, reason, invalid))
        waiting: dict[ConnectionId, list[WaitingPart]] = {}
        for key, count, preemptions, _, _ in report.waiting:
            entry = WaitingPart(key.stream, count, preemptions)
            waiting.setdefault(key.connection, []).append(entry)
        now, monotonic = time.time(), time.monotonic()
        for number, connection in self._connections.items():
            frame = Frame(
                epoch=self._identity.epoch,
                emit_s=now,
                load=report.load,
                seen=connection.seen,
                tokens=tokens.get(number, []),
                failures=failures.get(number, []),
                waiting=waiting.get(number, []),
                draining=self.draining,
            )
            connection.send(frame, monotonic)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            if self._engine is None:
                continue
            self._engine.poll_executor()
            self._keeper.expire()
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if now - connection.last_sent_s >= HEARTBEAT_S:
                    connection.send(self._empty_frame(self._engine.load, connection.seen), now)

    def _empty_frame(self, load: EngineLoad, seen: int) -> Frame:
        epoch = self._identity.epoch
        return Frame(epoch, time.time(), load, seen, [], [], draining=self.draining)

    # -- up ------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: _Connection | None = None
        try:
            connection = await self._greet(reader, writer)
            while (body := await codec.read_body(reader)) is not None:
                self._take(connection, codec.decode_up(body))
        except WireError as error:
            logger.warning("connection from a router is closed: %s", error)
            with contextlib.suppress(ConnectionError, RuntimeError):
                writer.write(codec.encode(Goodbye(str(error)[:1000])))
        finally:
            if connection is not None:
                self._connections.pop(connection.number, None)
                self._keeper.lose(connection.number)
                self._post(commands.DropConnection(connection.number))
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Connection:
        try:
            body = await asyncio.wait_for(codec.read_body(reader), HELLO_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise WireError(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None
        hello = None if body is None else codec.decode_up(body)
        if not isinstance(hello, Hello):
            raise WireError("the first message must be a hello")
        if not hmac.compare_digest(hello.secret.encode(), self._identity.secret.encode()):
            raise WireError("wrong cluster secret")
        if hello.version != PROTOCOL_VERSION:
            raise WireError(f"router speaks version {hello.version}, engine {PROTOCOL_VERSION}")
        identity = self._identity
        connection = _Connection(self._next_connection, hello.router_id, writer)
        self._next_connection += 1
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            engine_id=identity.engine_id,
            epoch=identity.epoch,
            model=identity.model,
            max_sequence_len=identity.max_sequence_len,
            max_num_seqs=identity.max_num_seqs,
            max_num_batched_tokens=identity.max_num_batched_tokens,
            metrics_port=self.metrics_port,
        )
        writer.write(codec.encode(welcome))
        self._connections[connection.number] = connection
        return connection

    def _take(self, connection: _Connection, message: Up) -> None:
        if isinstance(message, Submit):
            self._take_submit(connection, message)
            return
        if isinstance(message, Hello):
            raise WireError("a second hello")
        if isinstance(message, Adopt):
            self._hand_over(connection, message)
            return
        if isinstance(message, Forget):
            self._keeper.forget(message.token)
            return
        if isinstance(message, Drain):
            self.drain(undo=message.order is DrainOrder.UNDO)
            if message.order is DrainOrder.MOVE:
                self._post(commands.GiveAway(EMPTIED))
            return
        key = StreamKey(connection.number, message.stream)
        if isinstance(message, Abort):
            self._keeper.drop(key)
            self._post(commands.Abort(key))
        elif isinstance(message, Pause):
            self._post(commands.Pause(key))
        elif isinstance(message, Resume):
            self._post(commands.Resume(key))

    def _take_submit(self, connection: _Connection, message: Submit) -> None:
        if message.stream <= connection.seen:
            raise WireError(f"stream {message.stream} comes after stream {connection.seen}")
        vocab_size = self._identity.model.vocab_size
        ids = (*message.prompt_ids, *message.emitted_ids)
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise WireError(f"stream {message.stream}: token ids must be in [0, {vocab_size})")
        try:
            request = EngineRequest(
                tuple(message.prompt_ids),
                message.sampling,
                tuple(message.emitted_ids),
                priority=message.priority,
                tenant=message.tenant,
                ttft_objective_s=message.ttft_objective_s,
            )
        except InvalidRequest as error:
            raise WireError(f"stream {message.stream}: {error}") from error
        connection.seen = message.stream
        key = StreamKey(connection.number, message.stream)
        self._keeper.begin(key, message)
        self._post(commands.Submit(key, request))

    def _hand_over(self, connection: _Connection, message: Adopt) -> None:
        """Give a kept log to the router that asks. Whoever has the stream still is told."""
        found = self._keeper.adopt(message.token)
        log, key = (None, None) if found is None else found
        if key is not None:
            self._post(commands.Abort(key))
            holder = self._connections.get(key.connection)
            if holder is not None and self._engine is not None:
                frame = self._empty_frame(self._engine.load, holder.seen)
                frame.failures.append(Failure(key.stream, RESUMED_ELSEWHERE, []))
                holder.send(frame, time.monotonic())
        connection.send(Adopted(message.number, log), time.monotonic())

    def _post(self, command: commands.Command) -> None:
        if self._engine is not None:
            self._engine.post(command)
