"""The short form: at least 20 SIGKILLs and 10 SIGSTOPs under 64 streams. `make chaos` is longer."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.run import scenario

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def test_no_token_is_lost_doubled_or_reordered_whatever_dies() -> None:
    report = asyncio.run(scenario(kills=20, stops=10, concurrent=64, least=200, seed=1))
    print("\n".join(report.lines()))
    assert report.wrong == []
    assert len(report.failed) <= 0.001 * report.streams, report.lines()
    assert report.streams >= 200
    assert report.replays > 20, "the faults hit nobody"
    assert max(report.noticed_s) < 3.0
