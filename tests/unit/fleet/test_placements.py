"""Each placement does what its name says, and none overloads an engine."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.core.errors import ConfigError
from cluster.fleet.engines import DRAWN, EngineSet
from cluster.fleet.job import Job
from cluster.fleet.placements.affinity import PrefixAffinity, SessionAffinity
from cluster.fleet.placements.base import Candidates, Placement
from cluster.fleet.placements.least import LeastLoaded, LeastOutstanding
from cluster.fleet.placements.registry import PLACEMENTS, make_placement
from cluster.fleet.placements.spread import PowerOfTwo, RoundRobin
from cluster.fleet.snapshot import EngineSnapshot
from tests.unit.fleet.support import engine, job, load


def place(placement: Placement, engines: EngineSet, it: Job) -> EngineSnapshot:
    """As the fleet does it: choose, send, note."""

    def fits(snapshot: EngineSnapshot) -> bool:
        return snapshot.can_hold(it.sequence_len)

    drawn = [e for e in engines.draw() if fits(e)]
    chosen = placement.choose(Candidates(drawn, engines, fits), it)
    chosen.submitted(sum(len(e.unseen) for e in engines) + 1, it.tokens)
    engines.changed(chosen)
    placement.placed(chosen, it)
    return chosen


def fleet_of(placement: Placement, *snapshots: EngineSnapshot) -> EngineSet:
    engines = EngineSet()
    for snapshot in snapshots:
        engines.add(snapshot)
        placement.joined(snapshot)
    return engines


@pytest.mark.parametrize("name", [n for n in PLACEMENTS if "affinity" not in n])
def test_a_burst_between_two_frames_is_spread(name):
    """Without the correction for what is on the way it would all go to one engine."""
    placement = make_placement(name)
    engines = fleet_of(placement, *(engine(n, seqs=64) for n in "abcd"))
    counts = Counter(place(placement, engines, job(10)).engine_id for _ in range(40))
    assert all(6 <= counts[n] <= 14 for n in "abcd"), counts


@pytest.mark.parametrize("name", [LeastOutstanding.name, RoundRobin.name, PowerOfTwo.name])
def test_larger_engines_get_more(name):
    placement = make_placement(name)
    engines = fleet_of(placement, engine("big", 300, 1000), engine("small", 100, 1000))
    counts = Counter(place(placement, engines, job(16)).engine_id for _ in range(120))
    assert counts["big"] > 1.5 * counts["small"]


def test_round_robin_takes_turns():
    placement = RoundRobin()
    engines = fleet_of(placement, *(engine(n) for n in "abc"))
    order = [place(placement, engines, job()).engine_id for _ in range(9)]
    assert all(len(set(order[i : i + 3])) == 3 for i in (0, 3, 6))


def test_least_loaded_prefers_the_one_with_fewest_tokens_to_compute():
    placement = LeastLoaded()
    engines = fleet_of(placement, engine("a", waiting_tokens=500), engine("b", waiting_tokens=20))
    assert place(placement, engines, job()).engine_id == "b"


def test_the_same_prefix_goes_to_the_engine_that_holds_it_unless_it_is_loaded():
    placement = PrefixAffinity(chunk=64)
    engines = fleet_of(placement, *(engine(n, 10_000, seqs=1000) for n in "abcd"))
    system = tuple(range(640))
    first = place(placement, engines, job(700, prompt_ids=(*system, *range(60))))
    for number in range(3):
        again = place(placement, engines, job(700, prompt_ids=(*system, *[number] * 60)))
        assert again is first
    other = place(placement, engines, job(700, prompt_ids=tuple(range(9000, 9700))))
    assert other is not first
    first.updated(load(blocks_free=0, room=0, blocks_total=1000, running=9), seen=99)
    assert place(placement, engines, job(700, prompt_ids=(*system, 5))) is not first


def test_tenants_do_not_share_prefixes():
    placement = PrefixAffinity(chunk=8)
    engines = fleet_of(placement, *(engine(n, 1000, seqs=1000) for n in "ab"))
    prompt = tuple(range(80))
    mine = place(placement, engines, job(80, tenant="x", prompt_ids=prompt))
    assert place(placement, engines, job(80, tenant="y", prompt_ids=prompt)) is not mine


def test_a_lost_engine_s_prefixes_are_forgotten_and_memory_is_bounded():
    placement = PrefixAffinity(chunk=16)
    engines = fleet_of(placement, engine("a", 10, seqs=1000))
    for number in range(50):
        place(placement, engines, job(64, prompt_ids=tuple(range(number * 64, number * 64 + 64))))
    assert len(placement._holders) <= 10
    placement.left("a")
    assert not placement._holders


def test_sessions_stay_together_and_only_a_lost_engine_s_sessions_move():
    placement = SessionAffinity(bound=100.0)
    engines = fleet_of(placement, *(engine(n, 10_000, seqs=10_000) for n in "abcd"))
    sessions = [f"s{n}" for n in range(200)]
    before = {s: place(placement, engines, job(1, session=s)).engine_id for s in sessions}
    counts = Counter(before.values())
    assert all(counts[n] > 20 for n in "abcd"), counts
    assert before == {s: place(placement, engines, job(1, session=s)).engine_id for s in sessions}
    engines.remove("c")
    placement.left("c")
    after = {s: place(placement, engines, job(1, session=s)).engine_id for s in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {
        s for s in sessions if before[s] == "c"
    }


def test_draws_from_a_large_fleet_are_few_and_different_each_time():
    engines = EngineSet(seed=1)
    for number in range(1000):
        engines.add(engine(f"e{number:04}"))
    seen: Counter[str] = Counter()
    for _ in range(2000):
        drawn = engines.draw_open()
        assert len({e.engine_id for e in drawn}) == len(drawn) <= DRAWN
        seen.update(e.engine_id for e in drawn)
    assert len(seen) == 1000, "some engines are never looked at"
    assert max(seen.values()) < 5 * 2000 * DRAWN / 1000


def test_full_and_draining_engines_are_not_open():
    engines = EngineSet()
    full, drained = engine("a", room=0, running=8, blocks_free=0), engine("b")
    engines.add(full)
    engines.add(drained)
    assert [e.engine_id for e in engines.draw_open()] == ["b"]
    drained.draining = True
    engines.changed(drained)
    assert engines.draw_open() == []
    assert [e.engine_id for e in engines.draw()] == ["a"]
    full.updated(load(), seen=0)
    engines.changed(full)
    assert [e.engine_id for e in engines.draw_open()] == ["a"]


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"placement must be one of .*'round-robin'.*'magic'"):
        make_placement("magic")
