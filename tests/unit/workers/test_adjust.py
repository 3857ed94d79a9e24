"""Bias, penalties and bans against the plainest way to write them, and against transformers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import InvalidRequest
from cluster.core.plan import NewSequence
from cluster.core.sampling import SamplingParams
from workers import adjust, sequences
from workers.adjust import adjusted
from workers.history import TokenHistory
from workers.sampler import FAILED_TOKEN, Draw, sample
from workers.sequences import SequenceTable

VOCAB = 40
INF = float("inf")


def params(**values) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **values})


def draw(p: SamplingParams, prompt: list[int], output: list[int]) -> Draw:
    history = TokenHistory(np.array(prompt, np.int32), np.array(output, np.int32))
    return Draw(p, len(output), history if p.penalises else None)


def test_a_sequence_names_its_ids_once(monkeypatch):
    """65,536 allowed ids in 16 rows took a step of 20 ms to a second."""
    table = SequenceTable(max_num_seqs=2, max_model_len=16, block_size=4, vocab=VOCAB)
    p = params(
        allowed_token_ids=(3, 5, VOCAB + 1),
        logit_bias=((3, -1.5), (VOCAB, 9.0)),
        min_tokens=2,
        stop_token_ids=(5,),
    )
    table.admit(NewSequence(7, [1, 2, 3], 3, p))
    table.admit(NewSequence(8, [1, 2, 3], 3, params()))
    lane, other = table.grant(7, []), table.grant(8, [])
    logits = torch.linspace(-1, 1, VOCAB).repeat(2, 1)
    expected = adjusted(logits, [Draw(p, 0), Draw(params(), 0)])

    def made_again(*_):
        raise AssertionError("made in a step")

    for module in (adjust, sequences):
        monkeypatch.setattr(module, "NamedIds", made_again)
    draws = [Draw(*table.sampling(lane)), Draw(*table.sampling(other))]
    assert torch.equal(adjusted(logits[:1], draws[:1]), expected[:1])
    assert draws[1].named is None
    table.release(7)
    assert not table._named


def plain(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]):
    """One token at a time, in fp64."""
    counts, bias = Counter(output), dict(p.logit_bias)
    for token_id in range(len(logits)):
        value = logits[token_id] + bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            r = p.repetition_penalty
            value = value / r if value > 0 else value * r
        value -= p.frequency_penalty * counts[token_id]
        value -= p.presence_penalty * (counts[token_id] > 0)
        banned = p.allowed_token_ids and token_id not in p.allowed_token_ids
        if len(output) < p.min_tokens and token_id in p.stop_token_ids:
            banned = True
        yield -INF if banned else value


ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@st.composite
def sampling(draw) -> SamplingParams:
    return params(
        temperature=0.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 5.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.1])),
        logit_bias=tuple(
            draw(st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100))).items()
        ),
        allowed_token_ids=tuple(draw(st.one_of(st.just([]), ids))),
        stop_token_ids=(3, 5, VOCAB + 1),
        min_tokens=draw(st.sampled_from([0, 5])),
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_rows_are_adjusted_as_one_token_after_the_other(data, rows):
    cases, kept = [], []
    for _ in range(rows):
        prompt, output = data.draw(ids), data.draw(ids)
        try:
            cases.append((data.draw(sampling()), prompt, output))
        except InvalidRequest:
            continue
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(len(cases), VOCAB, generator=generator) * 5
    before = logits.clone()
    for row, case in enumerate(cases):
        kept.append(list(plain(logits[row].tolist(), *case)))
    found = adjusted(logits, [draw(*case) for case in cases])
    assert torch.equal(logits, before), "the caller's logits were changed"
    if cases:
        torch.testing.assert_close(
            found.double(), torch.tensor(kept).double(), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    prompt, output = [1, 2, 2, 9], [9, 30, 31]
    process = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = process(torch.tensor([prompt + output]), logits.clone())
    found = adjusted(logits, [draw(params(repetition_penalty=penalty), prompt, output)])
    torch.testing.assert_close(found, expected)


@settings(max_examples=100, deadline=None)
@given(ids, ids, st.lists(st.integers(0, 5000), max_size=600))
def test_a_history_kept_token_by_token_is_that_of_a_replay(prompt, output, more):
    """A replay builds it anew from the log; the penalties must not depend on which it was."""
    kept = TokenHistory(np.array(prompt, np.int32), np.array(output, np.int32))
    for token_id in more:
        kept.append(token_id)
    fresh = TokenHistory(np.array(prompt, np.int32), np.array(output + more, np.int32))
    assert kept.ids.tolist() == fresh.ids.tolist()
    assert kept.output_counts.tolist() == fresh.output_counts.tolist()
    counts = Counter(output + more)
    assert dict(zip(kept.ids.tolist(), kept.output_counts.tolist(), strict=True)) == {
        token_id: float(counts[token_id]) for token_id in [*prompt, *output, *more]
    }


def test_only_allowed_ids_are_drawn():
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(2))
    draws = [Draw(params(allowed_token_ids=(4, 17, 39), seed=s), 0) for s in range(50)]
    assert set(sample(logits, draws).token_ids) == {4, 17, 39}


def test_a_row_without_wishes_is_not_touched_by_its_neighbours():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    wishful = draw(params(frequency_penalty=2.0, logit_bias=((1, 100.0),)), [1], [2, 3, 3])
    found = adjusted(logits, [wishful, Draw(params(), 0)])
    assert torch.equal(found[1], logits[1])
    assert found[0, 1] > 90


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_untrustworthy_logits_fail_also_where_they_are_banned(bad):
    logits = torch.zeros(2, VOCAB)
    logits[0, 7] = bad
    drawn = sample(logits, [Draw(params(allowed_token_ids=(1,)), 0)] * 2)
    assert drawn.token_ids == [FAILED_TOKEN, 1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty.*between 0\.01 and 10, got 0\.0"),
        ({"presence_penalty": 2.5}, r"presence_penalty.*between -2 and 2, got 2\.5"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty.*got nan"),
        ({"logit_bias": ((7, 101.0),)}, r"logit_bias\[7\].*between -100 and 100, got 101\.0"),
        ({"logit_bias": ((7, 1.0), (7, 2.0))}, "logit_bias.*twice"),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "at most 1024 ids, got 1025"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids.*>= 0, got -1"),
        (
            {"allowed_token_ids": (2, 3), "stop_token_ids": (2, 3, 4), "min_tokens": 2},
            "nothing but stop tokens",
        ),
    ],
)
def test_impossible_wishes_are_refused_with_limit_and_value(values, says):
    with pytest.raises(InvalidRequest, match=says):
        params(**values)
