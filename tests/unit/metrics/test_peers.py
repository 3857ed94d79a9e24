from __future__ import annotations

from cluster.core.outcome import LossCause
from cluster.metrics.board import RouterBoard, RouterSummary
from cluster.metrics.facts import RouterCounters, RouterFacts
from cluster.metrics.peers import RouterRegistry


def summary(name: str) -> RouterSummary:
    facts = RouterFacts(6, 3, 450, 7, 5, 1, RouterCounters())
    return RouterBoard(name, lambda: facts).summary()


def test_routers_meet_and_are_forgotten_when_they_are_silent():
    registry = RouterRegistry(lease_s=5.0)
    one, two = summary("r1"), summary("r2")
    assert registry.meet(one, 0.0) == []
    assert registry.meet(two, 1.0) == [one]
    newer = one._replace(queued=9)
    assert registry.meet(newer, 2.0) == [two]
    assert registry.meet(two, 6.5) == [newer]
    assert registry.meet(two, 7.0) == []


def test_a_summary_says_how_the_router_is():
    told = summary("r1")
    assert (told.router_id, told.queued, told.relief_moves, told.ready) == ("r1", 3, 7, True)
    assert [tail.name for tail in told.tails] == ["ttft", "tpot", "itl", "gap"]
    assert told.metrics == ""
    assert set(LossCause) - set(RouterCounters().losses) == {LossCause.EMPTIED}
