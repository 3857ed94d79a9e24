"""Errors become small, complete statuses."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from cluster.core import errors
from cluster.gateway.status import MAX_TEXT_BYTES, MAX_VIOLATIONS, to_status

ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.HeadwayError)
]


def made(kind: type[errors.HeadwayError], text: str) -> errors.HeadwayError:
    if kind is errors.InvalidRequest:
        return errors.InvalidRequest.single("a.b", text)
    if kind is errors.Overloaded:
        return errors.Overloaded(text, 0.25)
    return kind(text)


@pytest.mark.parametrize("kind", ALL_ERRORS)
@pytest.mark.parametrize("text", ["", "plain", "한" * 5000, "a\r\n\x00b" * 3000, "\ud800"])
def test_every_error_fits_the_transport(kind: type[errors.HeadwayError], text: str) -> None:
    status = to_status(made(kind, text))
    assert status.code not in (code_pb2.OK, code_pb2.UNKNOWN)
    assert len(status.message.encode()) <= MAX_TEXT_BYTES
    assert "\n" not in status.message
    assert trailer_bytes(status) < 4096


def trailer_bytes(status: status_pb2.Status) -> int:
    """As sent: the text percent-encoded, the details in base64."""
    sent = rpc_status.to_status(status)
    details = dict(sent.trailing_metadata)["grpc-status-details-bin"]
    return len(quote(sent.details)) + len(base64.b64encode(details))


def test_many_violations_are_cut() -> None:
    many = [errors.FieldViolation("f" * 500, "d" * 500 + "ü") for _ in range(1000)]
    status = to_status(errors.InvalidRequest(many))
    assert trailer_bytes(status) < 4096
    assert len(status.SerializeToString()) > 1024
    assert MAX_VIOLATIONS == 8


def test_a_subclass_is_its_parent_on_the_wire() -> None:
    class Busy(errors.Overloaded):
        pass

    assert to_status(Busy("x", 1.0)).code == code_pb2.RESOURCE_EXHAUSTED


def test_an_unknown_error_tells_nothing() -> None:
    status = to_status(ValueError("a secret"))
    assert status.code == code_pb2.INTERNAL
    assert "secret" not in str(status)
