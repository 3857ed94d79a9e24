"""When a lost stream is gone on with, when not, and with which request."""

from __future__ import annotations

import grpc
import pytest

from headway.errors import ClientError, HeadwayRpcError, RetryableError
from headway.resuming import Progress
from headway.types import Accepted, Delivery, Delta, Finished, Sampling, generate_request
from headway.v1 import inference_pb2

ACCEPTED = Accepted("r", "m", 3, 77, 50, "token")
FINISHED = Finished("length", None, 3, 50, None, None, None, 0, 0)


def lost() -> RetryableError:
    return RetryableError(grpc.StatusCode.UNAVAILABLE, "socket closed", "", None)


def overloaded() -> RetryableError:
    return RetryableError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "OVERLOADED", 3.0)


def progress(now: list[float], window_s: float = 10.0) -> Progress:
    delivery = Delivery(resume_window_s=window_s)
    return Progress(generate_request("hi", Sampling(), "", delivery), lambda: now[0])


def begun(now: list[float]) -> Progress:
    it = progress(now)
    assert it.take(ACCEPTED) is ACCEPTED
    assert it.take(Delta(0, (5, 6), "ab", 0.0))
    return it


def test_a_lost_stream_is_resumed_where_it_was_and_accepted_only_once():
    it = begun([0.0])
    assert it.pause_s(lost()) < 1.0
    assert it.next_request() == inference_pb2.ResumeRequest(resume_token="token", next_index=2)
    assert it.take(ACCEPTED) is None
    assert it.take(FINISHED) is FINISHED
    assert it.finished
    with pytest.raises(RetryableError):
        it.pause_s(lost())


def test_a_token_that_nobody_knows_is_replaced_by_what_the_client_has():
    it = begun([0.0])
    it.pause_s(lost())
    it.pause_s(ClientError(grpc.StatusCode.NOT_FOUND, "gone", "UNKNOWN_RESUME_TOKEN"))
    again = it.next_request()
    assert isinstance(again, inference_pb2.GenerateRequest)
    assert (list(again.emitted_ids), again.sampling.seed, again.text) == ([5, 6], 77, "hi")


def test_what_was_lost_before_it_began_is_sent_again():
    it = progress([0.0])
    it.pause_s(lost())
    again = it.next_request()
    assert isinstance(again, inference_pb2.GenerateRequest)
    assert not again.emitted_ids
    assert not again.sampling.HasField("seed")


def test_a_refusal_is_no_loss():
    with pytest.raises(RetryableError, match="full"):
        progress([0.0]).pause_s(overloaded())


def test_a_router_that_is_full_is_given_the_time_it_asks_for():
    it = begun([0.0])
    assert it.pause_s(overloaded()) >= 3.0


def test_the_window_ends_the_tries_but_progress_opens_it_anew():
    now = [0.0]
    it = begun(now)
    it.pause_s(lost())
    now[0] = 9.0
    it.pause_s(lost())
    it.take(ACCEPTED)
    now[0] = 10.5
    with pytest.raises(RetryableError):
        it.pause_s(lost())
    it = begun(now)
    it.pause_s(lost())
    now[0] = 20.0
    it.take(Delta(2, (7,), "c", 0.0))
    now[0] = 29.0
    it.pause_s(lost())


def test_other_errors_stand():
    error = HeadwayRpcError(grpc.StatusCode.INTERNAL, "bug")
    with pytest.raises(HeadwayRpcError):
        begun([0.0]).pause_s(error)
