"""When a lost stream is gone on with, when not, and with which request."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from headway.errors import ClientError, HeadwayRpcError, RetryableError
from headway.messages import generate_request
from headway.resuming import Progress
from headway.types import Accepted, Delivery, Delta, Finished, Sampling
from headway.v1 import inference_pb2

ACCEPTED = Accepted("r", "m", 3, 77, 50, "token")
FINISHED = Finished("length", None, 3, 50, None, None, None, 0, 0)


def lost() -> RetryableError:
    return RetryableError(grpc.StatusCode.UNAVAILABLE, "socket closed", "", None)


def overloaded() -> RetryableError:
    return RetryableError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "OVERLOADED", 3.0)


def resume_from(positions: dict[int, int]) -> inference_pb2.ResumeRequest:
    wanted = [inference_pb2.Position(choice=c, next_index=i) for c, i in positions.items()]
    return inference_pb2.ResumeRequest(resume_token="token", positions=wanted)


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
    assert it.next_request() == resume_from({0: 2})
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
    assert list(again.emitted) == [inference_pb2.Emitted(choice=0, token_ids=[5, 6])]
    assert (again.sampling.seed, again.text) == (77, "hi")


def test_what_was_lost_before_it_began_is_sent_again():
    it = progress([0.0])
    it.pause_s(lost())
    again = it.next_request()
    assert isinstance(again, inference_pb2.GenerateRequest)
    assert not again.emitted
    assert not again.sampling.HasField("seed")


def test_choices_go_on_each_from_where_it_was_and_the_finished_ones_not_at_all():
    delivery = Delivery(resume_window_s=10.0)
    it = Progress(generate_request("hi", Sampling(n=3), "", delivery), lambda: 0.0)
    it.take(ACCEPTED)
    it.take(Delta(0, (5, 6), "ab", 0.0, choice=2))
    it.take(Delta(0, (7,), "c", 0.0, choice=0))
    it.take(dataclasses.replace(FINISHED, choice=0))
    it.pause_s(lost())
    assert it.next_request() == resume_from({1: 0, 2: 2})
    it.take(ACCEPTED)
    it.take(Delta(2, (8,), "d", 0.0, choice=2))
    it.pause_s(ClientError(grpc.StatusCode.NOT_FOUND, "gone", "UNKNOWN_RESUME_TOKEN"))
    again = it.next_request()
    assert isinstance(again, inference_pb2.GenerateRequest)
    assert {e.choice: list(e.token_ids) for e in again.emitted} == {1: [], 2: [5, 6, 8]}
    assert (again.sampling.seed, again.sampling.n) == (77, 3)
    it.take(ACCEPTED)
    it.take(dataclasses.replace(FINISHED, choice=2))
    assert not it.finished
    it.take(dataclasses.replace(FINISHED, choice=1))
    assert it.finished


@pytest.mark.parametrize("n", [-1, 0, 1 << 40])
def test_a_number_of_choices_that_no_server_takes_is_the_server_s_to_refuse(n):
    it = Progress(generate_request("hi", Sampling(n=n), "", Delivery(resume_window_s=10.0)))
    assert not it.finished
    assert it.next_request().sampling.n == n


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


def test_the_end_of_a_stream_that_had_begun_does_not_sound_like_one_that_never_did():
    now = [0.0]
    nobody = RetryableError(grpc.StatusCode.UNAVAILABLE, "failed to connect", "", 1.0)
    for it, message in (
        (begun(now), "the stream was lost after 2 tokens and did not go on within 10 s: failed"),
        (progress(now), "failed to connect"),
    ):
        now[0] = 0.0
        it.pause_s(lost())
        now[0] = 10.1
        with pytest.raises(RetryableError, match=f"^{message}") as caught:
            it.pause_s(nobody)
        assert (caught.value.code, caught.value.retry_after_s) == (nobody.code, 1.0)


def test_other_errors_stand():
    error = HeadwayRpcError(grpc.StatusCode.INTERNAL, "bug")
    with pytest.raises(HeadwayRpcError):
        begun([0.0]).pause_s(error)
