"""A server with known gaps is read back; a client that cannot keep up is found out."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from cluster.bench.experiments import measure_pace
from loadtests.job import Child, ChildFailed, Job
from loadtests.runner import run_load
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec
from loadtests.validity import Limits, validity_checks
from tests.load.mock import mock_server


def _job(address: str, **changes: object) -> Job:
    values: dict[str, object] = {"output_mean": 60.0, "output_cv": 0.0, **changes}
    return Job(Scenario(**values), TargetSpec(address=address))  # type: ignore[arg-type]


def _problems(results, limits: Limits | None = None) -> set[str]:
    return {c.name for c in validity_checks(results, limits or Limits()) if not c.passed}


def test_known_gaps_are_read_back_and_every_count_is_the_ledgers(tmp_path):
    """The machine is shared: the client is held to what the server really did, tick for tick,
    and to 10 ms only where the average cannot be moved by a neighbour's burst."""
    with mock_server(tmp_path) as mock:
        job = _job(mock.address, arrivals="constant:20", requests=60, warmup_s=0.5)
        results = run_load(job, children=2)
    counts, histograms = results.counts, results.histograms
    assert counts.scheduled == counts.sent == counts.finished == mock.ledger["requests"] == 60
    assert counts.tokens == counts.server_tokens == mock.ledger["tokens"] == 3600
    assert sum(r.prompt_tokens for r in results.records) == mock.ledger["prompt_tokens"]
    assert counts.failed == counts.faults == 0
    assert counts.measured == 50
    assert histograms["ITL"].count == histograms["ITL emitted"].count == 50 * 59
    assert histograms["TTFT"].count == histograms["TPOT"].count == 50
    assert "sent = scheduled" not in _problems(results)
    seen, emitted = histograms["ITL"], histograms["ITL emitted"]
    assert seen.mean_ms == pytest.approx(emitted.mean_ms, rel=0.02)
    assert seen.percentile_ms(50) == pytest.approx(emitted.percentile_ms(50), rel=0.05)
    assert histograms["TPOT"].percentile_ms(50) == pytest.approx(10.0, rel=0.05)


def test_the_pace_of_a_server_is_found_out(tmp_path):
    with mock_server(tmp_path) as mock:
        pace = measure_pace(TargetSpec(address=mock.address), streams=4, long_prompt=300)
    assert pace.step_s == pytest.approx(0.010, rel=0.1)
    assert mock.ledger["prompt_tokens"] >= 300
    assert 0 < pace.prefill_s < 1.0


def test_an_overloaded_client_is_judged_invalid(tmp_path):
    """A client that stands still for 0.6 s sees gaps that the server never made."""
    with mock_server(tmp_path) as mock:
        job = _job(mock.address, arrivals="constant:20", requests=40)
        child = Child(job, 0, 1)
        try:
            results = _run_with_pauses(child)
        finally:
            child.stop()
    assert results.counts.finished == 40
    assert "wire lag P99" in _problems(results)
    assert results.histograms["ITL"].max_ms > 500
    assert results.histograms["ITL emitted"].max_ms < results.histograms["ITL"].max_ms


def _run_with_pauses(child: Child):
    """A run whose client is stopped by a signal, as a starved one would be."""
    from loadtests.collect import ChildEnd, Results
    from loadtests.records import Record

    results = Results()
    results.expect_child(child.wait_ready())
    child.go(time.time() + 0.2)

    def pause() -> None:
        time.sleep(1.0)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(child.pid, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    for event in child.events():
        if "record" in event:
            results.add_record(Record.from_json(event["record"]))
        elif "end" in event:
            results.add_child(ChildEnd.from_json(event["end"]))
    thread.join()
    return results


def test_failures_are_counted_by_name_and_lose_no_request(tmp_path):
    with mock_server(tmp_path, "--fail-every", "5", "--gap-ms", "2") as mock:
        results = run_load(_job(mock.address, arrivals="constant:50", requests=30))
    assert results.errors == {"UNAVAILABLE": 6}
    assert (results.counts.finished, results.counts.failed) == (24, 6)
    assert mock.ledger["failed"] == 6
    assert results.counts.tokens == mock.ledger["tokens"]


def test_a_session_sends_its_history_and_closed_users_wait(tmp_path):
    with mock_server(tmp_path, "--gap-ms", "2") as mock:
        chat = _job(mock.address, arrivals="constant:20", requests=4, turns=3, think_s=0.3)
        turns = sorted(run_load(chat, 2).records, key=lambda r: r.prompt_tokens)
        closed = _job(mock.address, arrivals="closed:3", requests=12, output_mean=10.0)
        users = run_load(closed).records
    assert len(turns) == 12
    longest = turns[-1].prompt_tokens
    # Two answers of 60 tokens and two earlier questions are in it.
    assert longest > 120 + turns[0].prompt_tokens
    alive = [sum(a.sent_s <= b.sent_s < a.done_s for a in users) for b in users]
    assert len(users) == 12
    assert max(alive) == 3


def test_a_server_that_is_not_there_is_said_and_no_result_is_made():
    with pytest.raises(ChildFailed, match=r"127\.0\.0\.1:1"):
        run_load(_job("127.0.0.1:1", requests=1))
