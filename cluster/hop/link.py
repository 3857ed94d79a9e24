"""The router's side of the hop: keeps one connection to one engine and tells what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from cluster.core.errors import WireError
from cluster.core.outcome import LossCause
from cluster.core.owntime import OwnTime
from cluster.hop import codec
from cluster.hop.messages import (
    PROTOCOL_VERSION,
    Adopted,
    Frame,
    Goodbye,
    Hello,
    Up,
    Welcome,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """silence_s: an engine that sends no frame for this long is lost (it owes one per 200 ms)."""

    router_id: str
    secret: str
    connect_timeout_s: float = 2.0
    silence_s: float = 2.0
    retry_min_s: float = 0.1
    retry_max_s: float = 2.0


class LinkListener(Protocol):
    """Called in the link's asyncio loop, in the order in which things happened."""

    def on_up(self, link: EngineLink, welcome: Welcome) -> None: ...

    def on_frame(self, link: EngineLink, frame: Frame) -> None: ...

    def on_adopted(self, link: EngineLink, message: Adopted) -> None: ...

    def on_down(self, link: EngineLink, reason: str) -> None:
        """The connection that on_up announced is over; nothing more comes from it."""


class EngineLink:
    """Connects, reconnects with backoff until closed, and watches for silence."""

    def __init__(
        self, address: tuple[str, int], settings: LinkSettings, listener: LinkListener
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        """Set while the connection stands."""
        self.last_frame_s = 0.0
        """Monotonic time of the newest frame."""
        self.lost_by = LossCause.CLOSED
        """Why the newest connection is over; to be read in on_down."""
        self._settings = settings
        self._listener = listener
        self._writer: asyncio.StreamWriter | None = None
        self._cut_reason = ""
        self._closing = False
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def connected(self) -> bool:
        return self.welcome is not None

    def send(self, message: Up) -> None:
        """Write without waiting. Dropped when the connection is down: on_down tells of it."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._writer.write(codec.encode(message))

    def disconnect(self, reason: str, cause: LossCause = LossCause.BROKEN) -> None:
        """Cut the connection (silence, protocol broken); it is set up anew."""
        logger.warning("connection to engine at %s is cut: %s", _show(self.address), reason)
        if self._writer is not None:
            self._cut_reason = reason
            self.lost_by = cause
            self._writer.transport.abort()

    async def close(self) -> None:
        # The flag as well: before Python 3.12 wait_for() can swallow a cancellation.
        self._closing = True
        self._task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _keep_connected(self) -> None:
        delay = self._settings.retry_min_s
        while not self._closing:
            try:
                if await self._one_connection():
                    delay = self._settings.retry_min_s
            except (OSError, asyncio.TimeoutError, WireError) as error:
                logger.debug("engine at %s: %s", _show(self.address), error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._settings.retry_max_s)

    async def _one_connection(self) -> bool:
        """Connect and read until the end. True if the engine welcomed us."""
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(*self.address), self._settings.connect_timeout_s
        )
        reason = "closed by the engine"
        self._cut_reason, self.lost_by = "", LossCause.CLOSED
        try:
            self._writer = writer
            welcome = await self._handshake(reader)
            self.welcome = welcome
            self.last_frame_s = time.monotonic()
            self._listener.on_up(self, welcome)
            watch = asyncio.create_task(self._watch_silence())
            try:
                reason = await self._read_frames(reader)
            finally:
                watch.cancel()
        except WireError as error:
            reason, self.lost_by = str(error), LossCause.BROKEN
            raise
        finally:
            was_up, self.welcome, self._writer = self.connected, None, None
            writer.transport.abort()
            if was_up:
                self._listener.on_down(self, reason)
        return True

    async def _handshake(self, reader: asyncio.StreamReader) -> Welcome:
        settings = self._settings
        self.send(Hello(PROTOCOL_VERSION, settings.router_id, settings.secret))
        body = await asyncio.wait_for(codec.read_body(reader), settings.connect_timeout_s)
        if body is None:
            raise WireError("closed during the handshake")
        message = codec.decode_down(body)
        if isinstance(message, Goodbye):
            logger.error("engine at %s refuses: %s", _show(self.address), message.reason)
            raise WireError(message.reason)
        if not isinstance(message, Welcome) or message.version != PROTOCOL_VERSION:
            raise WireError("the engine did not answer with a welcome of this version")
        return message

    async def _read_frames(self, reader: asyncio.StreamReader) -> str:
        while (body := await codec.read_body(reader)) is not None:
            message = codec.decode_down(body)
            if isinstance(message, Goodbye):
                self.lost_by = LossCause.LEFT
                return message.reason
            self.last_frame_s = time.monotonic()
            if isinstance(message, Adopted):
                self._listener.on_adopted(self, message)
                continue
            if not isinstance(message, Frame):
                raise WireError("a second welcome")
            self._listener.on_frame(self, message)
        return self._cut_reason or "closed by the engine"

    async def _watch_silence(self) -> None:
        """A timer beside the reader: a timeout around every read would cost a task per frame."""
        limit, tick = self._settings.silence_s, self._settings.silence_s / 8
        own, silent_s, heard_s = OwnTime(tick, time.monotonic()), 0.0, self.last_frame_s
        while silent_s < limit:
            await asyncio.sleep(tick)
            now = time.monotonic()
            silent_s += own.passed(now)
            if self.last_frame_s != heard_s:
                heard_s = self.last_frame_s
                silent_s = min(silent_s, max(0.0, now - heard_s))
        self.disconnect(f"no frame for {limit:.1f} s", LossCause.SILENT)


def _show(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
