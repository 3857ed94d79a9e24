"""Dataclasses to messages and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headway import messages
from headway.errors import InvalidRequest
from headway.types import Message, Sampling
from headway.v1 import inference_pb2 as pb


def test_what_is_left_out_stays_absent() -> None:
    request = messages.generate_request("x", None, "")
    assert request.sampling.ListFields() == []
    assert request.text == "x"


def test_zero_and_false_are_sent() -> None:
    zeros = Sampling(min_tokens=0, temperature=0.0, top_k=0, min_p=0.0, seed=0, ignore_eos=False)
    sampling = messages.generate_request("x", zeros, "").sampling
    for name in ("min_tokens", "temperature", "top_k", "min_p", "seed", "ignore_eos"):
        assert sampling.HasField(name)


def test_every_sampling_field_is_carried() -> None:
    full = Sampling(
        9, 1, 0.5, 40, 0.9, 0.1, 7, ("a",), (3,), True, 1.5, 0.5, 0.25, {4: 1.5}, (5, 6), 2, 1, 3
    )
    message = messages.generate_request([1], full, "m").sampling
    for field in dataclasses.fields(Sampling):
        value = getattr(message, field.name)
        expected = getattr(full, field.name)
        assert (tuple(value) if isinstance(expected, tuple) else value) == expected, field.name
    assert {field.name for field in dataclasses.fields(Sampling)} == {
        field.name for field in pb.SamplingParams.DESCRIPTOR.fields
    }


def test_prompts() -> None:
    chat = messages.generate_request([Message("user", "hi")], None, "").chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi")]
    assert list(messages.generate_request((1, 2), None, "").token_ids.ids) == [1, 2]
    # Nothing to tell the kind by: it goes out as it is, and the server says that it is empty.
    assert messages.generate_request([], None, "").WhichOneof("input") == "token_ids"
    with pytest.raises(InvalidRequest):
        messages.tokenize_request([], "")


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "words"),
    [
        ("x", Sampling(stop="abc"), "sampling.stop", r"tuple of strings.*write \('abc',\)"),  # type: ignore[arg-type]
        ("x", Sampling(stop_token_ids=b"ab"), "sampling.stop_token_ids", "tuple of token ids"),  # type: ignore[arg-type]
        (b"text", None, "prompt", "got bytes; decode it"),
        (bytearray(b"text"), None, "prompt", "got bytearray"),
        ([Message("user", None)], None, "chat.messages[0].content", "must be a str, got None"),  # type: ignore[arg-type]
        (
            [Message("user", "x"), Message("user", b"y")],  # type: ignore[arg-type]
            None,
            "chat.messages[1].content",
            "must be a str, got b'y'",
        ),
        ([Message(None, "x")], None, "chat.messages[0].role", "must be a str"),  # type: ignore[arg-type]
    ],
)
def test_what_protobuf_would_take_for_something_else(
    prompt: Any, sampling: Sampling | None, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        messages.generate_request(prompt, sampling, "")
    assert [v.field for v in caught.value.violations] == [field]
    assert str(caught.value).startswith(field)
    if sampling is None:
        with pytest.raises(InvalidRequest, match=words):
            messages.tokenize_request(prompt, "")


def test_events_of_a_newer_server_are_passed_over() -> None:
    assert messages.event_of(pb.GenerateEvent()) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.Finished(reason="FINISH_REASON_STOP", stop_token_id=0), ("stop", 0)),
        (pb.Finished(reason="FINISH_REASON_STOP", stop_string="x"), ("stop", "x")),
        (pb.Finished(reason="FINISH_REASON_LENGTH"), ("length", None)),
    ],
)
def test_finished(message: pb.Finished, expected: tuple[str, str | int | None]) -> None:
    finished = messages.finished_of(message)
    assert (finished.reason, finished.matched_stop) == expected
    assert finished.total_s is None
