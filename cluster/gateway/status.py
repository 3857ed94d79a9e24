"""Errors of the core as gRPC statuses with google.rpc details.

Everything here stays small on purpose: a long status text or a big trailer makes the transport
replace the status by its own RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from cluster.core import errors

DOMAIN = "headway"
MAX_TEXT_BYTES = 512
MAX_VIOLATIONS = 8
MAX_FIELD_BYTES = 64
MAX_DESCRIPTION_BYTES = 120
DEFAULT_RETRY_S = 1.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class UnknownModel(errors.HeadwayError):
    """The request names a model that is not served. Maps to NOT_FOUND."""


class UnknownEngine(errors.HeadwayError):
    """The router has no engine of that name. Maps to NOT_FOUND."""


class Unauthenticated(errors.HeadwayError):
    """No valid API key. Maps to UNAUTHENTICATED."""


class _Kind(NamedTuple):
    code: int
    reason: str


_KINDS: dict[type[errors.HeadwayError], _Kind] = {
    errors.InvalidRequest: _Kind(code_pb2.INVALID_ARGUMENT, "INVALID_REQUEST"),
    UnknownModel: _Kind(code_pb2.NOT_FOUND, "MODEL_NOT_FOUND"),
    Unauthenticated: _Kind(code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.Overloaded: _Kind(code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED"),
    errors.Unavailable: _Kind(code_pb2.UNAVAILABLE, "UNAVAILABLE"),
    errors.EngineLost: _Kind(code_pb2.UNAVAILABLE, "ENGINE_LOST"),
    errors.SlowReader: _Kind(code_pb2.ABORTED, "SLOW_READER"),
    errors.ResumedElsewhere: _Kind(code_pb2.ABORTED, "RESUMED_ELSEWHERE"),
    errors.UnknownResumeToken: _Kind(code_pb2.NOT_FOUND, "UNKNOWN_RESUME_TOKEN"),
    UnknownEngine: _Kind(code_pb2.NOT_FOUND, "ENGINE_NOT_FOUND"),
    errors.SequenceFailed: _Kind(code_pb2.INTERNAL, "SEQUENCE_FAILED"),
}
_INTERNAL = _Kind(code_pb2.INTERNAL, "INTERNAL")


def to_status(error: Exception) -> status_pb2.Status:
    """The status that a client gets for `error`.

    Anything that is not a HeadwayError is a bug here: its text stays in the log.
    """
    kind = next((_KINDS[c] for c in type(error).__mro__ if c in _KINDS), _INTERNAL)
    known = isinstance(error, errors.HeadwayError)
    text = _cut(str(error), MAX_TEXT_BYTES) if known else "internal error; see the server's log"
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=kind.reason, domain=DOMAIN)]
    if isinstance(error, errors.InvalidRequest):
        details.append(_bad_request(error.violations))
    retry_after_s = _retry_after(error)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(retry)
    return status_pb2.Status(code=kind.code, message=text, details=[_pack(d) for d in details])


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the status of `error`; raises grpc's own AbortError."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


async def answer(context: grpc.aio.ServicerContext[Any, Any], work: Awaitable[_T]) -> _T:
    """The result of `work`; its errors end the call with their status."""
    try:
        return await work
    except errors.HeadwayError as error:
        if to_status(error).code == code_pb2.INTERNAL:
            _log.error("call failed: %s: %s", type(error).__name__, error)
        await abort(context, error)
    except Exception as error:
        # A write to a call that the client has left fails with an error of grpc's core,
        # not with CancelledError; nobody is there to tell, and nothing is wrong.
        if context.done():
            raise
        _log.exception("unexpected error in a call")
        await abort(context, error)


def _retry_after(error: Exception) -> float | None:
    if isinstance(error, errors.Overloaded):
        return error.retry_after_s
    if isinstance(error, errors.Unavailable | errors.EngineLost):
        return DEFAULT_RETRY_S
    return None


def _bad_request(violations: Sequence[errors.FieldViolation]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(v.field, MAX_FIELD_BYTES),
                description=_cut(v.description, MAX_DESCRIPTION_BYTES),
            )
            for v in violations[:MAX_VIOLATIONS]
        ]
    )


def _cut(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8, without line breaks."""
    raw = " ".join(text.split()).encode("utf-8", "replace")
    if len(raw) > limit:
        raw = raw[: limit - 3].decode("utf-8", "ignore").encode() + b"..."
    return raw.decode("utf-8")


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
