"""What `headway serve` says when engines go and come."""

from __future__ import annotations

from cluster.rollcall import RollCall


def test_only_changes_are_told():
    lines: list[str] = []
    roll_call = RollCall(lines.append)
    for present in (["a", "b"], ["a", "b"], ["b"], ["b"], ["b", "c"], [], ["d"]):
        roll_call(present)
    assert lines == [
        "a is gone; 1 engine left to go on with its streams",
        "c is up; 2 engines now",
        "b is gone; its streams wait for the next engine",
        "c is gone; its streams wait for the next engine",
        "d is up; 1 engine now",
    ]


def test_an_engine_that_is_replaced_between_two_looks_is_told_of_too():
    lines: list[str] = []
    roll_call = RollCall(lines.append)
    roll_call(["a", "b"])
    roll_call(["b", "c"])
    assert lines == [
        "a is gone; 2 engines left to go on with its streams",
        "c is up; 2 engines now",
    ]
