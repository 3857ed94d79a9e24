"""What travels between the leader of a group and its other ranks: MessagePack, length-prefixed,
over a Unix socket in a folder that only this user can enter."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Generic, TypeAlias, TypeVar

import msgspec

from cluster.core.config import WorkerConfig
from cluster.core.errors import HeadwayError, WireError
from cluster.core.plan import StepPlan

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("!I")

Received = TypeVar("Received")


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A rank's first message."""

    rank: int
    pid: int


class Loading(msgspec.Struct, tag="loading", frozen=True):
    stage: str
    share: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The rank waits for plans. weight_bytes: as held in its memory."""

    weight_bytes: int


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A sign of life."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The rank's last message. bad_setup: the operator has to change something."""

    reason: str
    bad_setup: bool


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """What to load. carrier: "shm" (its memory's descriptor comes with the message), "gloo" or
    "nccl"; port: of the store through which the latter two meet."""

    config: WorkerConfig
    host_blocks: int
    size: int
    carrier: str
    port: int


class Run(msgspec.Struct, tag="run", frozen=True):
    plan: StepPlan


FromRank: TypeAlias = Hello | Loading | Ready | Beat | Failed
ToRank: TypeAlias = Setup | Run


class Channel(Generic[Received]):
    """One end of a connection. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket, received: object) -> None:
        """received: the union of messages that may come in."""
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._sending = threading.Lock()

    def send(self, message: FromRank | ToRank) -> None:
        """Raises OSError when the other end is gone, WireError beyond the limit."""
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"message of {len(body)} bytes, limit {MAX_FRAME_BYTES}")
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Received | None:
        """The next message, None at the end. Raises WireError for anything malformed."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise WireError(f"peer announces {length} bytes, limit {MAX_FRAME_BYTES}")
        body = self._read(length)
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, HeadwayError, OverflowError) as error:
            raise WireError(f"not a message of a tensor-parallel group: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes the thread that is in `receive`, which `close` alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except (ConnectionError, OSError):
                return None
            if not count:
                return None
            done += count
        return data
