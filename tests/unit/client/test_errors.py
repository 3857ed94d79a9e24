"""How the client reads a failed call, also when a proxy has been at it."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headway.errors import (
    DETAILS_KEY,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    HeadwayRpcError,
    InvalidRequest,
    RetryableError,
    ServerError,
    from_rpc_error,
)

CODE = grpc.StatusCode


def failure(code: grpc.StatusCode, *details: Message, raw: bytes | None = None) -> grpc.RpcError:
    status = status_pb2.Status()
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    value = status.SerializeToString() if raw is None else raw
    trailers = grpc.aio.Metadata((DETAILS_KEY, value))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, "text")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.INVALID_ARGUMENT, InvalidRequest),
        (CODE.NOT_FOUND, ClientError),
        (CODE.UNAUTHENTICATED, ClientError),
        (CODE.UNIMPLEMENTED, ClientError),
        (CODE.RESOURCE_EXHAUSTED, ClientError),
        (CODE.UNAVAILABLE, RetryableError),
        (CODE.INTERNAL, ServerError),
        (CODE.ABORTED, ServerError),
        (CODE.UNKNOWN, ServerError),
        (CODE.DATA_LOSS, ServerError),
        (CODE.DEADLINE_EXCEEDED, DeadlineExceeded),
        # Not by us: a server or a proxy that stopped before the call had ended.
        (CODE.CANCELLED, RetryableError),
    ],
)
@pytest.mark.parametrize("raw", [b"", b"\xff\xff\xff garbage"])
def test_codes(code: grpc.StatusCode, kind: type[HeadwayRpcError], raw: bytes) -> None:
    error = from_rpc_error(failure(code, raw=raw))
    assert type(error) is kind
    assert error.code is code
    assert error.reason == ""


@pytest.mark.parametrize("text", ["Locally cancelled by application!", "Channel closed!"])
def test_what_this_side_gave_up_is_not_to_be_sent_again(text: str) -> None:
    given_up = grpc.aio.AioRpcError(CODE.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
    assert type(from_rpc_error(given_up)) is Cancelled


def test_details() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1250)
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="headway")
    error = from_rpc_error(failure(CODE.RESOURCE_EXHAUSTED, info, retry))
    assert isinstance(error, RetryableError)
    assert (error.reason, error.retry_after_s) == ("OVERLOADED", 1.25)

    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="too big")
    error = from_rpc_error(failure(CODE.INVALID_ARGUMENT, bad))
    assert isinstance(error, InvalidRequest)
    assert [(v.field, v.description) for v in error.violations] == [("sampling.top_p", "too big")]


def test_a_call_without_trailers() -> None:
    error = grpc.aio.AioRpcError(CODE.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "")
    assert isinstance(from_rpc_error(error), RetryableError)
    assert str(from_rpc_error(error)) == "UNAVAILABLE"
