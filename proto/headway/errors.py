"""What a call can end with, by what the caller can do about it.

HeadwayRpcError
  ClientError      change the request (or the key, or the model's name)
    InvalidRequest   ... these fields of it
  ServerError      not the caller's fault, and sending it again is unlikely to help
    RetryableError   send the same request again after `retry_after_s`
  DeadlineExceeded the caller's own time limit passed
  Cancelled        the call was given up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DETAILS_KEY = "grpc-status-details-bin"

_CLIENT_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ALREADY_EXISTS,
        # Without RetryInfo it comes from the transport: the request is too large.
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


_CANCELLED_HERE = ("Locally cancelled by application!", "Channel closed!")
"""What gRPC says of a call that this side gave up. Others with this code were ended over there."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request, and what is wrong with it."""

    field: str
    description: str


class HeadwayRpcError(Exception):
    """Base of every error of a call.

    code: gRPC's status. reason: Headway's stable name of the cause ("OVERLOADED", see
    inference.proto), empty when the transport and not Headway ended the call.
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class ClientError(HeadwayRpcError):
    """The request cannot succeed as it is."""


class InvalidRequest(ClientError):
    """Some fields are wrong; `violations` says which and why."""

    def __init__(
        self, message: str, reason: str = "", violations: tuple[FieldViolation, ...] = ()
    ) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message, reason)
        self.violations = violations


class ServerError(HeadwayRpcError):
    """The server failed."""


class RetryableError(ServerError):
    """No room or nobody there just now; the same request may succeed after `retry_after_s`."""

    def __init__(
        self, code: grpc.StatusCode, message: str, reason: str, retry_after_s: float
    ) -> None:
        super().__init__(code, message, reason)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(HeadwayRpcError):
    """`timeout_s` passed before the call was finished."""


class Cancelled(HeadwayRpcError):
    """The call was cancelled on this side."""


def from_rpc_error(error: grpc.RpcError) -> HeadwayRpcError:
    """The error that a failed call of grpc or grpc.aio stands for."""
    call: Any = error
    code: grpc.StatusCode = call.code()
    message = call.details() or code.name
    info, bad_request, retry = _details(call.trailing_metadata())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(code, "the deadline passed", info.reason)
    if code is grpc.StatusCode.CANCELLED and message in _CANCELLED_HERE:
        return Cancelled(code, message, info.reason)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        found = tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations)
        return InvalidRequest(message, info.reason, found)
    if retry is not None:
        return RetryableError(code, message, info.reason, retry)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        # Nobody answered at all: the server is starting, restarting or elsewhere. Or it stopped,
        # or a proxy did, before the call had ended.
        return RetryableError(code, message, info.reason, 1.0)
    kind = ClientError if code in _CLIENT_CODES else ServerError
    return kind(code, message, info.reason)


def _details(trailers: Any) -> tuple[Any, Any, float | None]:
    """ErrorInfo, BadRequest (both empty when absent) and RetryInfo's seconds."""
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry_after_s: float | None = None
    raw = next((value for key, value in trailers or () if key == DETAILS_KEY), None)
    status = status_pb2.Status()
    try:
        status.ParseFromString(raw or b"")
        for detail in status.details:
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            detail.Unpack(info)
            detail.Unpack(bad_request)
    except DecodeError:
        # A proxy in between may put anything there; code and text still say what happened.
        pass
    return info, bad_request, retry_after_s
