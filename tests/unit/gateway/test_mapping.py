"""Every field is checked: what comes out of the mapping is valid, whatever came in."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.core.errors import InvalidRequest, ModelError
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.gateway import mapping
from cluster.gateway.status import UnknownModel
from cluster.router.stream import GenerationRequest, StreamTiming, TokenBatch
from cluster.text.folder import GenerationDefaults
from headway.v1 import inference_pb2 as pb
from tests.wire.wire_support import tiny_model

TEXT = mapping.ModelText((2, 0), GenerationDefaults(0.6, 20, 0.95, 0.05), True)
MODEL = tiny_model()

numbers = st.one_of(
    st.floats(), st.sampled_from([0.0, -0.0, 1e-8, 1.0, 2.0**31, math.nan, math.inf, -math.inf])
)
integers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 300))
ids = st.integers(0, 2**32 - 1)
messages = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": integers,
        "min_tokens": integers,
        "temperature": numbers,
        "top_k": integers,
        "top_p": numbers,
        "min_p": numbers,
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.lists(st.text(max_size=300), max_size=20),
        "stop_token_ids": st.lists(ids | st.integers(0, 511), max_size=70),
        "ignore_eos": st.booleans(),
    },
)


@given(fields=messages, prompt=st.integers(1, 300))
@example(fields={}, prompt=255)
@example(fields={}, prompt=256)
@example(fields={"min_tokens": 256}, prompt=1)
def test_valid_or_refused(fields: dict[str, object], prompt: int) -> None:
    message = pb.SamplingParams(**fields)
    prompt_ids = [1] * prompt
    try:
        sampling = mapping.sampling_of(message, MODEL, TEXT)
        params = mapping.fit(sampling, mapping.TextPrompt("x"), prompt_ids, MODEL)
    except InvalidRequest as error:
        fields_named = [v.field.partition(".")[0] for v in error.violations]
        params = None
    if params is None:
        assert fields_named
        assert set(fields_named) <= {"sampling", "text"}
        return
    assert prompt + params.max_tokens <= MODEL.max_model_len
    assert 0 <= params.min_tokens <= params.max_tokens
    assert all(token_id < MODEL.vocab_size for token_id in params.stop_token_ids)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        expected = fields.get(name, getattr(TEXT.defaults, name))
        assert getattr(params, name) == expected
    if "seed" in fields:
        assert params.seed == fields["seed"]
    assert fields.get("ignore_eos") or {0, 2} <= set(params.stop_token_ids)


def test_explicit_zero_is_not_a_default() -> None:
    message = pb.SamplingParams(temperature=0.0, top_k=0, min_p=0.0, seed=0)
    params = mapping.sampling_of(message, MODEL, TEXT).params
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0.0, 0, 0.0, 0)


def test_what_only_follows_from_another_violation_is_not_told() -> None:
    with pytest.raises(InvalidRequest) as caught:
        mapping.sampling_of(pb.SamplingParams(max_tokens=-5), MODEL, TEXT)
    assert [v.field for v in caught.value.violations] == ["sampling.max_tokens"]


@pytest.mark.parametrize(
    ("model", "limit"),
    [(tiny_model(), 256), (tiny_model(num_blocks=4), 64), (tiny_model(max_model_len=10), 10)],
)
def test_the_smaller_of_context_and_pool_is_the_limit(model: ModelInfo, limit: int) -> None:
    assert mapping.sequence_limit(model) == limit


def test_a_tokenizer_that_knows_more_tokens_than_the_model() -> None:
    sampling = mapping.sampling_of(pb.SamplingParams(), MODEL, TEXT)
    with pytest.raises(InvalidRequest, match=r"text: token 1: id must be below 512, got 512"):
        mapping.fit(sampling, mapping.TextPrompt("x"), [1, 512], MODEL)


def test_no_tokens_is_no_prompt() -> None:
    sampling = mapping.sampling_of(pb.SamplingParams(), MODEL, TEXT)
    with pytest.raises(InvalidRequest, match="no tokens"):
        mapping.fit(sampling, mapping.TextPrompt("\u200b"), [], MODEL)


def test_model_names() -> None:
    mapping.check_model("", MODEL)
    mapping.check_model("tiny", MODEL)
    with pytest.raises(UnknownModel, match="'tiny' is"):
        mapping.check_model("Tiny", MODEL)


def test_recommendations_that_could_never_be_served() -> None:
    folder = Path("models") / "tiny"
    mapping.check_defaults(TEXT.defaults, folder)
    with pytest.raises(ModelError, match=r"^models/tiny/generation_config\.json.*temperature"):
        mapping.check_defaults(GenerationDefaults(temperature=-1.0), folder)


def test_duplicate_stop_strings_are_one() -> None:
    sampling = mapping.sampling_of(pb.SamplingParams(stop=["a", "b", "a"]), MODEL, TEXT)
    assert sampling.stop == ("a", "b")


def test_events() -> None:
    params = SamplingParams(max_tokens=9, seed=2**64 - 1)
    request = GenerationRequest("id", (5, 6, 7), params)
    accepted = mapping.accepted_event(request, MODEL, "tok").accepted
    assert (accepted.request_id, accepted.resume_token) == ("id", "tok")
    assert (accepted.seed, accepted.max_tokens, accepted.prompt_tokens) == (2**64 - 1, 9, 3)
    batch = TokenBatch(4, [7, 8, 9], 1_700_000_000.25, None)
    delta = mapping.delta_event(batch, 2, "ab").delta
    assert (delta.first_index, list(delta.token_ids), delta.text) == (4, [7, 8], "ab")
    assert delta.emit_time_unix_us == 1_700_000_000_250_000


@pytest.mark.parametrize(
    ("matched", "kind"), [("", "stop_string"), (0, "stop_token_id"), (None, None)]
)
def test_what_stopped_it_is_told_even_when_it_is_falsy(
    matched: str | int | None, kind: str | None
) -> None:
    usage = pb.Usage(prompt_tokens=1, completion_tokens=0)
    timing = StreamTiming(queue_s=0.0, preemptions=2)
    event = mapping.finished_event(FinishReason.STOP, matched, usage, timing)
    finished = event.finished
    assert finished.WhichOneof("matched_stop") == kind
    assert finished.timing.HasField("queue_s")
    assert not finished.timing.HasField("total_s")
    assert finished.timing.preemptions == 2


def test_default_sampling_message_round_trips() -> None:
    message = mapping.default_sampling_message(TEXT.defaults)
    assert not message.HasField("max_tokens")
    assert not message.HasField("seed")
    again = mapping.sampling_of(message, MODEL, mapping.ModelText((), GenerationDefaults(), False))
    assert again.params.temperature == 0.6
    assert again.params.top_k == 20
