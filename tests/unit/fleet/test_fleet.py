"""Token log and registry: pure, with made-up times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.outcome import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.fleet.registry import EngineRecord, EngineRegistry
from cluster.fleet.token_log import SequenceGap, TokenLog


def log() -> TokenLog:
    return TokenLog((1, 2, 3), SamplingParams(max_tokens=50))


def test_only_the_current_epoch_is_accepted():
    it = log()
    first = it.open_epoch()
    assert it.accept(first, 0, [7, 8]) == 2
    second = it.open_epoch()
    assert it.accept(first, 2, [9]) == 0
    assert it.accept(second, 2, [10]) == 1
    assert it.emitted == [7, 8, 10]


def test_tokens_held_already_are_passed_over():
    it = log()
    epoch = it.open_epoch()
    it.accept(epoch, 0, [7, 8])
    assert it.accept(epoch, 0, [7, 8]) == 0
    assert it.accept(epoch, 1, [8, 9, 10]) == 2
    assert it.emitted == [7, 8, 9, 10]


def test_a_gap_is_an_error_and_changes_nothing():
    it = log()
    epoch = it.open_epoch()
    it.accept(epoch, 0, [7])
    with pytest.raises(SequenceGap, match="token 1 is missing, the producer is at 2"):
        it.accept(epoch, 2, [9])
    assert it.emitted == [7]


def test_nothing_comes_after_the_finish():
    it = log()
    epoch = it.open_epoch()
    it.accept(epoch, 0, [7], FinishReason.STOP)
    assert it.finish is FinishReason.STOP
    assert it.accept(epoch, 1, [8]) == 0
    assert it.emitted == [7]


@given(st.data())
def test_whatever_the_producers_do_the_log_is_a_prefix(data):
    """Producers of several epochs send overlapping, doubled and late pieces of one output."""
    truth = list(range(100, 140))
    it = log()
    epochs = [it.open_epoch()]
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            epochs.append(it.open_epoch())
        epoch = data.draw(st.sampled_from(epochs))
        first = data.draw(st.integers(0, len(truth)))
        count = data.draw(st.integers(0, 6))
        held = len(it.emitted)
        try:
            fresh = it.accept(epoch, first, truth[first : first + count])
        except SequenceGap:
            assert first > held
            assert epoch == it.epoch
            fresh = 0
        assert len(it.emitted) == held + fresh
        assert it.emitted == truth[: len(it.emitted)]
        if epoch != it.epoch:
            assert fresh == 0


def test_leases_expire_and_are_renewed():
    registry = EngineRegistry(lease_s=5.0)
    record = EngineRecord("a", "127.0.0.1", 1, epoch=10)
    assert registry.renew(record, now=0.0)
    assert registry.alive(4.9) == [record]
    assert registry.renew(record, now=4.9)
    assert registry.alive(9.8) == [record]
    assert registry.alive(9.9) == []


def test_an_older_epoch_neither_replaces_nor_removes_a_newer_one():
    registry = EngineRegistry()
    old, new = EngineRecord("a", "h", 1, epoch=1), EngineRecord("a", "h", 2, epoch=2)
    assert registry.renew(new, now=0.0)
    assert not registry.renew(old, now=0.0)
    registry.remove("a", epoch=1)
    assert registry.alive(0.0) == [new]
    registry.remove("a", epoch=2)
    assert registry.alive(0.0) == []
