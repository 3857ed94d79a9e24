"""The compiled argmax and race against torch's: the same winners, whatever the width."""

from __future__ import annotations

import pytest
import torch

from workers import race
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
