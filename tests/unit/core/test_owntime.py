from __future__ import annotations

import pytest

from cluster.core.owntime import OwnTime


def test_a_late_tick_counts_in_full_and_a_stop_for_two_ticks() -> None:
    own = OwnTime(tick_s=0.5, now_s=100.0)
    assert own.passed(100.5) == pytest.approx(0.5)
    assert own.passed(101.4) == pytest.approx(0.9)
    assert own.passed(161.4) == pytest.approx(1.0)
    assert own.passed(161.9) == pytest.approx(0.5)
