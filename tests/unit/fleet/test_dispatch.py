"""Late binding, the gate, relief and priorities, decided without a single engine."""

from __future__ import annotations

import pytest

from cluster.core.errors import ConfigError, Overloaded
from cluster.fleet.binding import EagerBinding
from cluster.fleet.dispatch import Fleet, FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.job import Job
from cluster.fleet.relief import ReliefSettings, Waiting
from cluster.fleet.snapshot import EngineSnapshot
from tests.unit.fleet.support import BLOCK, Notebook, engine, job, load


def fleet(*snapshots: EngineSnapshot, **settings: object) -> tuple[Fleet, Notebook]:
    notebook = Notebook()
    it = Fleet(notebook, settings=FleetSettings(**settings))  # type: ignore[arg-type]
    for snapshot in snapshots:
        it.joined(snapshot, 0.0)
    return it, notebook


def full(name: str, **values: object) -> EngineSnapshot:
    return engine(name, **({"blocks_free": 0, "running": 4} | values))


def frees(it: Fleet, name: str, now: float = 1.0, seen: int = 1 << 30, **values: object) -> None:
    it.heard(name, load(**values), seen, (), now)


# -- late binding ------------------------------------------------------------------------------


def test_a_job_that_would_wait_everywhere_waits_at_the_router_and_goes_to_the_first_with_room():
    it, notebook = fleet(full("a"), full("b"))
    waiting = job()
    it.offer(waiting, 0.0)
    assert notebook.sent == []
    frees(it, "b", blocks_free=50, running=2)
    assert notebook.where(waiting) == "b"
    assert not it.waiting


def test_jobs_without_any_engine_wait_for_the_first_one():
    it, notebook = fleet()
    early = [job() for _ in range(3)]
    for one in early:
        it.offer(one, 0.0)
    it.joined(engine("a"), 5.0)
    assert [one for one, _ in notebook.sent] == early


def test_a_frame_with_room_for_one_does_not_call_for_two():
    it, notebook = fleet(full("a"))
    for _ in range(3):
        it.offer(job(10 * BLOCK), 0.0)
    frees(it, "a", blocks_free=15, running=4)
    assert len(notebook.sent) == 1
    frees(it, "a", blocks_free=5, running=5)
    assert len(notebook.sent) == 1
    frees(it, "a", blocks_free=25, running=3)
    assert len(notebook.sent) == 3


def test_nobody_overtakes_a_large_job_within_its_priority():
    it, notebook = fleet(full("a"))
    large, small = job(50 * BLOCK), job(BLOCK)
    it.offer(large, 0.0)
    it.offer(small, 0.0)
    frees(it, "a", blocks_free=20, running=1)
    assert notebook.sent == []
    frees(it, "a", blocks_free=80, running=1)
    assert [one for one, _ in notebook.sent] == [large, small]


def test_a_returning_job_goes_before_newcomers():
    it, notebook = fleet(full("a"))
    new, lost = job(), job()
    it.offer(new, 0.0)
    it.again(lost, 0.0)
    frees(it, "a", running=1)
    assert [one for one, _ in notebook.sent] == [lost, new]


def test_tenants_take_turns_whatever_one_of_them_piles_up():
    it, notebook = fleet(full("a", blocks=10_000, seqs=1000))
    for _ in range(50):
        it.offer(job(2000, tenant="loud", output=1), 0.0)
    quiet = [job(100, tenant="quiet", output=1) for _ in range(5)]
    for one in quiet:
        it.offer(one, 0.0)
    it.heard("a", load(blocks_free=100_000, room=100_000, running=1), 0, (), 1.0)
    it_order = [one.tenant for one, _ in notebook.sent]
    assert "quiet" in it_order[:3]
    assert sum(tenant == "quiet" for tenant in it_order[:12]) == 5


def test_a_job_larger_than_an_engine_goes_where_it_fits():
    it, notebook = fleet(engine("small", 10), engine("large", 1000))
    big = job(50 * BLOCK)
    it.offer(big, 0.0)
    assert notebook.where(big) == "large"


def test_eager_binding_sends_at_once():
    notebook = Notebook()
    it = Fleet(notebook, binding=EagerBinding())
    it.joined(full("a"), 0.0)
    one = job()
    it.offer(one, 0.0)
    assert notebook.where(one) == "a"


def test_dropped_and_overdue_jobs_leave_the_queue():
    it, notebook = fleet(full("a"), gate=GateSettings(queue_timeout_s=2.0))
    gone, late = job(), job()
    it.offer(gone, 0.0)
    it.offer(late, 1.0)
    it.drop(gone)
    it.drop(gone)
    assert it.overdue(2.5) == []
    assert it.overdue(3.0) == [late]
    frees(it, "a", running=0)
    assert notebook.sent == []
    assert (len(it.waiting), it.waiting.tokens) == (0, 0)


# -- gate --------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_the_limit_and_a_time_to_come_again():
    it, _ = fleet(full("a"), gate=GateSettings(max_queued=2))
    it.offer(job(tenant="x"), 0.0)
    it.offer(job(tenant="x"), 0.0)
    with pytest.raises(
        Overloaded, match="2 requests of this tenant are waiting, the limit is 2"
    ) as e:
        it.offer(job(tenant="x"), 0.0)
    assert e.value.retry_after_s >= 0.1
    it.offer(job(tenant="y"), 0.0)


def test_queued_tokens_are_bounded_but_one_large_job_may_always_wait():
    it, _ = fleet(full("a"), gate=GateSettings(max_queued_tokens=1000))
    it.offer(job(1400), 0.0)
    with pytest.raises(Overloaded, match=r"1400 prompt tokens .* has 16, the limit is 1000"):
        it.offer(job(16), 0.0)


def test_a_wait_beyond_the_objective_is_refused_at_once():
    it, _ = fleet(full("a", seqs=10_000), gate=GateSettings(ttft_objective_s=2.0))
    # 160 tokens a second leave the queue.
    for number in range(20):
        it.waiting.push(job(16))
        it.heard("a", load(room=1, running=4), number, (), number * 0.1)
    for _ in range(8):
        it.offer(job(16), 2.0)
    it.offer(job(320), 2.0)
    with pytest.raises(Overloaded, match=r"token would come after about \d\.\d s.* 2 s") as error:
        it.offer(job(16), 2.0)
    assert error.value.retry_after_s > 0
    patient = job(16, ttft_objective_s=60.0)
    it.offer(patient, 2.0)
    assert patient in it.waiting


def test_refusing_costs_the_same_with_a_thousand_engines():
    """The decision itself: no scan over engines or queue."""
    it, _ = fleet(*(full(f"e{n}") for n in range(1000)), gate=GateSettings(max_queued=1))
    it.offer(job(), 0.0)
    assert it.engines.draw_open() == []
    with pytest.raises(Overloaded):
        it.offer(job(), 0.0)


# -- relief ------------------------------------------------------------------------------------


def stuck_at(it: Fleet, home: str, *jobs: Job, now: float = 1.0, **values: object) -> None:
    gauges = {"blocks_free": 0, "running": 4, "waiting": len(jobs)} | values
    it.heard(home, load(**gauges), 1 << 30, [Waiting(j, j.tokens) for j in jobs], now)


def placed_at(it: Fleet, notebook: Notebook, name: str) -> Job:
    """A job that was sent to the engine of that name, the only one at first."""
    one = job(20 * BLOCK)
    it.offer(one, 0.0)
    assert notebook.where(one) == name
    return one


def test_a_victim_goes_on_where_there_is_room_for_all_of_it():
    it, notebook = fleet(engine("a"))
    victim = placed_at(it, notebook, "a")
    it.joined(engine("b", blocks_free=60, running=3), 0.5)
    stuck_at(it, "a", victim)
    assert notebook.taken_back == [victim]
    assert notebook.where(victim) == "b"
    assert (victim.moves, it.moved) == (1, 1)


def test_no_move_into_an_engine_that_would_soon_be_short_itself():
    it, notebook = fleet(engine("a"))
    victim = placed_at(it, notebook, "a")
    # 20 blocks and a margin of 5 are needed.
    it.joined(engine("b", blocks_free=24, running=3), 0.5)
    stuck_at(it, "a", victim)
    assert notebook.taken_back == []
    assert notebook.where(victim) == "a"


def test_who_comes_in_at_home_with_the_next_step_stays():
    it, notebook = fleet(engine("a"))
    first, second = placed_at(it, notebook, "a"), placed_at(it, notebook, "a")
    it.joined(engine("b", running=1), 0.5)
    stuck_at(it, "a", first, second, blocks_free=30)
    assert notebook.taken_back == [second], "the first fits at home, the second does not"


def test_a_job_moves_a_few_times_at_most():
    it, notebook = fleet(engine("a"), relief=ReliefSettings(max_moves=3))
    victim = placed_at(it, notebook, "a")
    it.joined(engine("b", running=1), 0.5)
    for turn in range(6):
        here = notebook.where(victim) or ""
        other = "b" if here == "a" else "a"
        frees(it, other, running=1)
        stuck_at(it, here, victim, now=1.0 + turn)
    assert victim.moves == 3


def test_several_victims_do_not_all_rush_to_the_same_room():
    it, notebook = fleet(engine("a"))
    victims = [placed_at(it, notebook, "a") for _ in range(4)]
    it.joined(engine("b", blocks_free=50, running=1), 0.5)
    it.joined(engine("c", blocks_free=50, running=1), 0.5)
    stuck_at(it, "a", *victims)
    assert sorted(notebook.where(v) or "" for v in victims) == ["b", "b", "c", "c"]


def test_without_relief_nobody_moves():
    it, notebook = fleet(engine("a"), relief=ReliefSettings(max_moves=0))
    victim = placed_at(it, notebook, "a")
    it.joined(engine("b", running=1), 0.5)
    stuck_at(it, "a", victim)
    assert notebook.taken_back == []


# -- priorities, drain, loss -------------------------------------------------------------------


def test_a_high_priority_job_goes_where_lower_ones_hold_the_most_blocks():
    it, notebook = fleet(full("a", held=((0, 30), (5, 70))), full("b", held=((0, 80), (5, 20))))
    urgent, equal = job(40 * BLOCK, priority=3), job(40 * BLOCK, priority=0)
    it.offer(equal, 0.0)
    assert notebook.where(equal) is None
    it.offer(urgent, 0.0)
    assert notebook.where(urgent) == "b"


def test_a_draining_engine_gets_nothing_new():
    it, notebook = fleet(engine("a"), engine("b"))
    it.drain("a")
    for _ in range(4):
        it.offer(job(), 0.0)
    assert {name for _, name in notebook.sent} == {"b"}


def test_a_lost_engine_is_not_chosen_again():
    it, notebook = fleet(engine("a"), engine("b"))
    lost = placed_at(it, notebook, "a")
    it.left("a")
    it.again(lost, 1.0)
    assert notebook.where(lost) == "b"


# -- new weights -------------------------------------------------------------------------------


def test_a_stream_stays_with_its_weights_while_somebody_who_has_them_takes_work():
    old, spare, new = engine("old"), engine("spare"), engine("z-new")
    old.weights = spare.weights = "v1"
    new.weights = "v2"
    it, notebook = fleet(old, spare, new)
    it.drain("spare")
    begun = job(weights="v1", begun=True)
    it.again(begun, 1.0)
    assert notebook.where(begun) == "old"
    # No room with its own weights: it waits rather than change them in mid-stream.
    frees(it, "old", blocks_free=0, running=4)
    late = job(weights="v1", begun=True)
    it.again(late, 2.0)
    assert notebook.where(late) is None
    frees(it, "old", now=3.0)
    assert notebook.where(late) == "old"


def test_a_stream_goes_on_with_other_weights_once_its_own_are_going_or_gone():
    old, new = full("old"), engine("new")
    old.weights, new.weights = "v1", "v2"
    it, notebook = fleet(old, new)
    begun = job(weights="v1", begun=True)
    it.again(begun, 1.0)
    assert notebook.where(begun) is None
    it.drain("old")
    frees(it, "new", now=1.5)
    assert notebook.where(begun) == "new"
    assert begun.weights == "v2"
    it.drain("old", undo=True)
    it.left("old")
    other = job(weights="v1", begun=True)
    it.again(other, 2.0)
    assert notebook.where(other) == "new"


def test_relief_does_not_change_weights_either():
    home, new = full("home", waiting=1, room=0), engine("new")
    home.weights, new.weights = "v1", "v2"
    it, notebook = fleet(home, new)
    victim = job(weights="v1", begun=True)
    frees_nothing = load(blocks_free=0, running=4, waiting=1)
    it.heard("home", frees_nothing, 1, [Waiting(victim, 64)], 1.0)
    assert notebook.taken_back == []
    new.weights = "v1"
    it.heard("home", frees_nothing, 1, [Waiting(victim, 64)], 2.0)
    assert notebook.where(victim) == "new"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GateSettings(ttft_objective_s=float("nan")), r"ttft_objective_s .* got nan"),
        (lambda: GateSettings(ttft_objective_s=0.0), r"between 0\.001 and 86400, got 0\.0"),
        (lambda: GateSettings(queue_timeout_s=float("nan")), "queue_timeout_s must be above 0"),
        (lambda: GateSettings(max_queued=-1), "max_queued must be at least 0, got -1"),
        (lambda: ReliefSettings(max_moves=-1), "max_moves must be between 0 and 100, got -1"),
    ],
)
def test_impossible_settings_are_refused_with_limit_and_value(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_nobody_waits_beyond_the_time_in_which_the_first_token_is_wanted():
    """Also where nothing can be predicted, since no engine takes anything."""
    it, _ = fleet(gate=GateSettings(queue_timeout_s=60.0))
    hurried, patient, lost = job(ttft_objective_s=1.0), job(), job(ttft_objective_s=1.0)
    lost.begun = True
    it.offer(hurried, 0.0)
    it.offer(patient, 0.0)
    it.again(lost, 0.0)
    assert it.overdue(0.9) == []
    assert it.overdue(1.0) == [hurried]
    assert set(it.overdue(60.0)) == {patient, lost}


def test_with_no_queue_who_finds_no_room_is_refused():
    it, notebook = fleet(engine("a"), gate=GateSettings(max_queued=0))
    it.offer(job(), 0.0)
    assert len(notebook.sent) == 1
    frees(it, "a", blocks_free=0, running=8)
    with pytest.raises(Overloaded):
        it.offer(job(), 0.0)
