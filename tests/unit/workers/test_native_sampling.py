"""The compiled argmax, race and filters against torch's: the same winners, whatever the width."""

from __future__ import annotations

import pytest
import torch

from workers import nucleus, race
from workers.native import bindings
from workers.native.build import BuildError

ROWS = 24


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    try:
        bindings.load_kernels(request.param)
    except BuildError as error:
        pytest.skip(str(error))
    return request.param


def in_torch(monkeypatch, function, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(bindings, "kernels_for", lambda tensor: None)
        return function(*arguments)


def logits_of(dtype: torch.dtype, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(ROWS, vocab, generator=generator)).to(dtype)


@pytest.mark.parametrize("vocab", [1, 5, 16, 129, 4096, 5003])
def test_largest(dtype, vocab, monkeypatch):
    logits = logits_of(dtype, vocab, 1)
    peaks, ids = race.largest(logits)
    expected_peaks, expected_ids = in_torch(monkeypatch, race.largest, logits)
    assert torch.equal(peaks, expected_peaks)
    assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_the_peak(dtype, value):
    logits = logits_of(dtype, 100, 2)
    logits[3] = value
    logits[5, 99] = float("nan")
    logits[6, 0] = float("nan")
    finite = torch.isfinite(race.largest(logits)[0])
    assert (~finite).nonzero()[:, 0].tolist() == [3, 5, 6]


@pytest.mark.parametrize("vocab", [1, 17, 4096, 5003])
@pytest.mark.parametrize("temperature", [0.05, 0.8, 5.0])
def test_the_same_token_wins_the_race(dtype, vocab, temperature, monkeypatch):
    temperatures = torch.full((ROWS,), temperature, dtype=torch.float64)
    for seed in range(10):
        logits = logits_of(dtype, vocab, seed)
        if vocab > 3:
            logits[:, 3] = float("-inf")
        peaks = race.largest(logits)[0]
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randint(-(2**31), 2**31, (ROWS, 2), generator=generator).to(torch.int32)
        arguments = logits, peaks, temperatures, keys
        expected = in_torch(monkeypatch, race.draw_unfiltered, *arguments)
        assert torch.equal(race.draw_unfiltered(*arguments), expected)


@pytest.mark.parametrize("vocab", [1, 17, 5003, 49_152])
@pytest.mark.parametrize("scale", [0.2, 3.0, 12.0], ids=lambda scale: f"scale {scale}")
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (40, 1.0, 0.0),
        (3000, 0.9, 0.0),
        (40, 0.8, 0.05),
        (1 << 30, 0.95, 0.0),
        (1 << 30, 0.9999999, 0.0),
        (1 << 30, 0.95, 1e-3),
        (1 << 30, 1.0, 0.1),
        (1 << 30, 1.0, 1e-9),
    ],
)
def test_the_same_token_is_drawn_under_filters(
    dtype, vocab, scale, top_k, top_p, min_p, monkeypatch
):
    logits = (logits_of(dtype, vocab, 3).float() * (scale / 3)).to(dtype)
    if vocab > 3:
        logits[:, 3] = float("-inf")
    peaks = race.largest(logits)[0]
    generator = torch.Generator().manual_seed(vocab)
    filters = nucleus.Filters(
        temperature=torch.rand(ROWS, dtype=torch.float64, generator=generator) + 0.3,
        top_k=torch.full((ROWS,), min(top_k, vocab)),
        top_p=torch.full((ROWS,), top_p, dtype=torch.float64),
        min_p=torch.full((ROWS,), min_p, dtype=torch.float64),
    )
    keys = torch.randint(-(2**31), 2**31, (ROWS, 2), generator=generator).to(torch.int32)
    drawn = nucleus.draw_filtered(logits, peaks, filters, keys)
    wide = logits.float()  # torch's way is made for what `adjusted` gives
    expected = in_torch(monkeypatch, nucleus.draw_filtered, wide, peaks, filters, keys)
    assert torch.equal(drawn, expected)


def test_filters_leave_rows_alone_that_are_not_finite(dtype):
    logits = logits_of(dtype, 500, 4)
    logits[2] = float("nan")
    filters = nucleus.Filters(
        temperature=torch.ones(ROWS, dtype=torch.float64),
        top_k=torch.full((ROWS,), 20),
        top_p=torch.full((ROWS,), 0.9, dtype=torch.float64),
        min_p=torch.zeros(ROWS, dtype=torch.float64),
    )
    keys = torch.zeros(ROWS, 2, dtype=torch.int32)
    drawn = nucleus.draw_filtered(logits, race.largest(logits)[0], filters, keys)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 500
