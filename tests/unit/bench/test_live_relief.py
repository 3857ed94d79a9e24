"""The real relief benchmark, in small: engines as processes, every token counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.bench.live_relief import CONTEXT, MAX_OUTPUT, WAYS, Live, measure, requests
from cluster.bench.tiny_model import write_tiny_model

SMALL = Live("small", rate=40.0, shares=(0.8, 0.2), num_blocks=120, engines=2)
COUNT = 24


def test_the_load_is_the_same_for_both_ways_and_another_one_with_another_seed():
    once, again = requests(SMALL, 200, seed=1), requests(SMALL, 200, seed=1)
    assert once == again
    assert once != requests(SMALL, 200, seed=2)
    times = [at_s for at_s, _ in once]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200 / SMALL.rate, rel=0.3)
    outputs = [request.sampling.max_tokens for _, request in once]
    assert 150 < sum(outputs) / len(outputs) < 400
    assert max(outputs) <= MAX_OUTPUT


@pytest.mark.timeout(180)
def test_streams_that_lose_their_blocks_go_on_elsewhere_and_none_loses_a_token(tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny", CONTEXT)
    asked = sum(r.sampling.max_tokens for _, r in requests(SMALL, COUNT, seed=0))
    found = asyncio.run(measure(SMALL, WAYS["cluster-wide"], model, COUNT, seed=0))
    assert found.tokens == asked
    assert len(found.tpot_s) == COUNT
    assert found.moves > 0
    assert len(found.stalls_s) > 0
    assert found.tokens_per_s > 0
