"""Length-prefixed MessagePack over an asyncio stream."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from cluster.core.errors import HeadwayError, WireError
from cluster.hop.messages import MAX_FRAME_BYTES, Down, Up

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_up = msgspec.msgpack.Decoder(Up)
_down = msgspec.msgpack.Decoder(Down)


def encode(message: Up | Down) -> bytes:
    """4 bytes of length, big endian, then the message."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"message of {len(body)} bytes, limit {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_up(body: bytes) -> Up:
    """Raises WireError for anything that is not a well-formed message from a router."""
    try:
        return _up.decode(body)
    except (msgspec.DecodeError, HeadwayError, OverflowError) as error:
        raise WireError(f"not a message from a router: {error}") from error


def decode_down(body: bytes) -> Down:
    """Raises WireError for anything that is not a well-formed message from an engine."""
    try:
        return _down.decode(body)
    except (msgspec.DecodeError, HeadwayError, OverflowError) as error:
        raise WireError(f"not a message from an engine: {error}") from error


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's bytes; None at a clean or broken end of the stream."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise WireError(f"peer announces {length} bytes, limit {MAX_FRAME_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError, OSError):
        return None
