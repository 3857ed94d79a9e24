from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.sampling import SamplingParams, counter_key
from workers.native import bindings
from workers.nucleus import FIRST_WIDTH
from workers.sampler import FAILED_TOKEN, Draw, sample

INF = float("inf")


@pytest.fixture(scope="module", params=["kernels", "torch"])
def way(request):
    """Both ways to draw: tests that ask for it run on each."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(bindings, "kernels_for", lambda tensor: None)
        yield


both_ways = pytest.mark.usefixtures("way")


def params(**values) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **values})


def distribution(logits: torch.Tensor, p: SamplingParams) -> list[tuple[int, float]]:
    """The obvious way: sort everything, filter, renormalise. (id, probability), likeliest first."""
    rows = sorted(enumerate(logits.double().tolist()), key=lambda item: (-item[1], item[0]))
    peak = rows[0][1]
    weighted = [(i, math.exp((v - peak) / p.temperature)) for i, v in rows]
    if p.top_k:
        weighted = weighted[: p.top_k]
    if p.top_p < 1.0:
        mass, total, kept = 0.0, math.fsum(w for _, w in weighted), []
        for token_id, weight in weighted:
            kept.append((token_id, weight))
            mass += weight
            if mass >= p.top_p * total:
                break
        weighted = kept
    if p.min_p:
        weighted = [(i, w) for i, w in weighted if w >= p.min_p]
    total = math.fsum(w for _, w in weighted)
    return [(i, w / total) for i, w in weighted]


def noise(key: int, token_id: int) -> float:
    """The exponential noise of one token, in plain Python."""
    bits = (token_id * 0x9E3779B1 ^ key) & 0xFFFFFFFF
    for half in (key >> 32, None):
        bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        bits ^= bits >> 16
        if half is not None:
            bits ^= half
    return -math.log1p(-((bits & 0x7FFFFFFF) + 0.5) / (1 << 31))


def neighbourhood(logits: torch.Tensor, p: SamplingParams, index: int) -> set[int]:
    """Ids that an exact sampler may draw when sums and speeds are off by a rounding error."""
    key = counter_key(p.seed, index)
    speeds = {i: q / noise(key, i) for i, q in distribution(logits, p) if q > 0}
    # Where the filters cut, a rounding error may keep one token more or less.
    fewer = {i: q / noise(key, i) for i, q in distribution(logits, p)[:-1] if q > 0}
    more = dict(speeds)
    order = sorted(enumerate(logits.double().tolist()), key=lambda item: (-item[1], item[0]))
    if len(more) < len(order) and p.top_k != len(more):
        weight = math.exp((order[len(more)][1] - order[0][1]) / p.temperature)
        first = next(iter(speeds))
        unit = speeds[first] * noise(key, first)
        more[order[len(more)][0]] = weight * unit / noise(key, order[len(more)][0])
    near: set[int] = set()
    for race in (speeds, fewer, more):
        if race:
            best = max(race.values())
            near |= {i for i, speed in race.items() if speed >= best * (1 - 1e-5)}
    return near


@st.composite
def logit_rows(draw) -> torch.Tensor:
    vocab = draw(st.sampled_from([1, 2, 63, 64, 65, 256, 257, 1000, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    row = torch.randn(vocab, generator=generator) * draw(
        st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0])
    )
    if draw(st.booleans()):  # many ties, as logits in bf16 have
        row = (row * 4).round() / 4
    if vocab > 2 and draw(st.booleans()):  # some tokens are forbidden
        row[torch.rand(vocab, generator=generator) < 0.3] = -INF
        row[int(torch.randint(vocab, (1,), generator=generator))] = 1.0
    return row


@st.composite
def sampling_params(draw) -> SamplingParams:
    return params(
        temperature=draw(st.sampled_from([0.05, 0.5, 1.0, 2.0, 10.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 50, 63, 64, 65, 500, 1 << 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.001, 0.3, 0.9, 0.95, 0.999, 0.9999999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.01, 0.5, 1.0])),
        seed=draw(st.integers(0, (1 << 64) - 1)),
    )


@both_ways
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(logit_rows(), sampling_params(), st.integers(0, 1000)), min_size=1))
def test_agrees_with_a_full_sort(cases):
    for logits, p, index in cases[:3]:
        drawn = sample(logits[None], [Draw(p, index)])
        assert drawn.failed == {}
        assert drawn.token_ids[0] in neighbourhood(logits, p, index)


@both_ways
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(sampling_params(), st.integers(0, 99)), min_size=2, max_size=12),
    st.sampled_from([65, 256, 1000, 4099]),
    st.randoms(use_true_random=False),
)
def test_a_row_does_not_see_its_neighbours(cases, vocab, chooser):
    generator = torch.Generator().manual_seed(chooser.randrange(1 << 30))
    logits = (torch.randn(len(cases), vocab, generator=generator) * 3).to(torch.bfloat16)
    draws = [Draw(p, index) for p, index in cases]
    alone = [sample(logits[r : r + 1], [draws[r]]).token_ids[0] for r in range(len(cases))]
    order = list(range(len(cases)))
    chooser.shuffle(order)
    together = sample(logits[order], [draws[r] for r in order]).token_ids
    assert together == [alone[r] for r in order]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 3.0, "top_p": 0.97},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(filters):
    """Chi-square over 40,000 draws with fixed seeds; tokens expected under 10 times are pooled."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 1.5
    rows, draws_per_row = 400, 100
    counts = torch.zeros(300, dtype=torch.int64)
    for index in range(draws_per_row):
        draws = [Draw(params(seed=seed, **filters), index) for seed in range(rows)]
        ids = sample(logits.expand(rows, -1), draws).token_ids
        counts += torch.bincount(torch.tensor(ids), minlength=300)
    total = rows * draws_per_row
    expected = torch.zeros(300, dtype=torch.float64)
    for token_id, probability in distribution(logits, params(**filters)):
        expected[token_id] = probability * total
    assert counts[expected == 0].sum() == 0
    rare = expected < 10
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = max(1, len(wanted) - 1)
    # Mean and standard deviation of chi-square are k and sqrt(2k): five of them never by chance.
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(3, 200)
    logits[0, [7, 90, 150]] = 2.0
    logits[2, 199] = 1.0
    greedy = params(temperature=0.0)
    assert sample(logits, [Draw(greedy, 0)] * 3).token_ids == [7, 0, 199]


def test_top_k_of_equals_keeps_the_lowest_ids():
    logits = torch.zeros(1, 5000)
    drawn = {
        sample(logits, [Draw(params(top_k=3, seed=seed), 0)]).token_ids[0] for seed in range(60)
    }
    assert drawn == {0, 1, 2}


@both_ways
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_flat_distribution_widens_past_the_first_candidates(top_p):
    """A nearly flat row needs far more than the first candidates to reach its mass."""
    vocab = 4096
    logits = torch.linspace(1e-3, 0, vocab)[None]
    highest = max(
        sample(logits, [Draw(params(top_p=top_p, seed=seed), 0)]).token_ids[0]
        for seed in range(300)
    )
    assert FIRST_WIDTH < highest < math.ceil(top_p * vocab) + 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.fill_(-INF),
        lambda row: row.fill_(math.nan),
        lambda row: row.index_fill_(0, torch.tensor([17]), math.nan),
        lambda row: row.index_fill_(0, torch.tensor([17]), INF),
    ],
    ids=["all -inf", "all NaN", "one NaN", "one +inf"],
)
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9}], ids=str)
def test_non_finite_row_fails_alone(spoil, kind):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    draws = [Draw(params(seed=row, **kind), 4) for row in range(3)]
    healthy = sample(logits, draws).token_ids
    spoil(logits[1])
    drawn = sample(logits, draws)
    assert drawn.token_ids == [healthy[0], FAILED_TOKEN, healthy[2]]
    assert set(drawn.failed) == {1}
    assert "not finite" in drawn.failed[1]


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((1, 300), -INF)
    logits[0, 299] = 0.0
    for kind in ({}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 0.0}):
        drawn = sample(logits, [Draw(params(seed=3, **kind), 0)])
        assert drawn.token_ids == [299]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 5}], ids=str)
def test_no_stop_token_before_min_tokens(kind):
    logits = torch.zeros(1, 50)
    logits[0, [3, 8]] = 30.0
    p = params(min_tokens=5, stop_token_ids=(3, 8, 10_000), **kind)
    early = {sample(logits, [Draw(p, index)]).token_ids[0] for index in range(5)}
    assert early.isdisjoint({3, 8})
    assert sample(logits, [Draw(p, 5)]).token_ids[0] in {3, 8}
    assert logits[0, 3] == 30.0, "the caller's logits are left alone"


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_masking_does_not_hide_bad_logits(bad):
    logits = torch.zeros(1, 50)
    logits[0, 3] = bad
    p = params(min_tokens=5, stop_token_ids=(3,), temperature=0.0)
    assert sample(logits, [Draw(p, 0)]).failed


def test_only_stop_tokens_left_fails_the_row():
    logits = torch.full((1, 10), -INF)
    logits[0, 3] = 1.0
    p = params(min_tokens=5, stop_token_ids=(3,), temperature=0.0)
    assert sample(logits, [Draw(p, 0)]).failed


def test_draws_follow_seed_and_index():
    logits = torch.zeros(1, 1000)
    draws = [(seed, index) for seed in range(20) for index in range(20)]
    first = [sample(logits, [Draw(params(seed=s), i)]).token_ids[0] for s, i in draws]
    again = [sample(logits, [Draw(params(seed=s), i)]).token_ids[0] for s, i in draws]
    assert first == again
    assert len(set(first)) > 250
    keys = [counter_key(s, i) for s, i in draws]
    assert first == [min(range(1000), key=lambda t, k=key: noise(k, t)) for key in keys]


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}], ids=str)
def test_a_rounding_error_hardly_ever_changes_a_draw(filters):
    """A replay in another batch has logits that differ in the last bits. An inverse CDF over a
    vocabulary like this one draws otherwise about once in a hundred times."""
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(3)) * 2
    rounded = logits * (1 + 2e-7 * torch.randn(logits.shape))
    changed = 0
    for index in range(120):
        draws = [Draw(params(seed=row, **filters), index) for row in range(8)]
        one, other = sample(logits, draws).token_ids, sample(rounded, draws).token_ids
        changed += sum(a != b for a, b in zip(one, other, strict=True))
    assert changed <= 1


def test_no_rows():
    assert sample(torch.empty(0, 10), []).token_ids == []


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 700},
        {"top_k": 3000, "top_p": 0.6},
        {"top_p": 0.5, "temperature": 1.5},
        {"min_p": 0.001},
        {"top_p": 0.9999, "min_p": 0.02},
    ],
    ids=str,
)
@both_ways
def test_wide_rows_beside_narrow_ones_agree_with_a_full_sort(filters):
    """Rows that need hundreds to thousands of candidates, in one batch with peaked ones."""
    scales = [0.5, 1.5, 2.5, 8.0] * 2
    noise = torch.randn(len(scales), 20_000, generator=torch.Generator().manual_seed(9))
    logits = noise * torch.tensor(scales)[:, None]
    draws = [Draw(params(seed=row, **filters), row) for row in range(len(scales))]
    for row, token_id in enumerate(sample(logits, draws).token_ids):
        assert token_id in neighbourhood(logits[row], draws[row].params, row)
