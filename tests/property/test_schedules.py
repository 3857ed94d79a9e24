"""Twenty thousand random schedules by seed; `python -m tests.property.schedules` runs millions."""

from __future__ import annotations

from tests.property.schedules import COUNTED, run_many

COUNT = 20_000


def test_random_schedules_keep_every_promise():
    seen = run_many(first=0, count=COUNT)
    # The mix must reach what it is there to check.
    for name in (*COUNTED, "copies", "overlaps"):
        assert seen[name] > COUNT // 200, f"{name} happened in {seen[name]} of {COUNT} schedules"
