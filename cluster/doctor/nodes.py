"""The probe on every node of a Ray cluster. The only module of the doctor that knows Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.connect import connected
from cluster.doctor.facts import NodeFacts
from cluster.doctor.probe import probe

TIMEOUT_S = 120.0
"""Of the nodes' answers: a worker process starts and imports torch."""


@dataclass(frozen=True, slots=True)
class Answer:
    """facts: None where `problem` says why. clock_gap_s: of the node's clock, ahead of ours."""

    node: str
    facts: NodeFacts | None
    problem: str = ""
    clock_gap_s: float = 0.0


def probe_all(address: str, ports: Mapping[str, str]) -> list[Answer]:
    """Every live node's answer. Raises NoCluster."""
    with connected(address):
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return _ask([node for node in nodes if node["Alive"]], ports)


def _ask(nodes: list[dict[str, Any]], ports: Mapping[str, str]) -> list[Answer]:
    """All at once; the clock is compared when an answer comes in."""
    asked: dict[Any, str] = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(probe).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked[task.remote(ports)] = f"{node['NodeName']} ({node['NodeID'][:6]})"
    answers: list[Answer] = []
    deadline = time.monotonic() + TIMEOUT_S
    while asked:
        left = max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(asked), num_returns=1, timeout=left)
        if not done:
            late = f"no answer within {TIMEOUT_S:g} s"
            return [*answers, *(Answer(name, None, late) for name in asked.values())]
        answers.append(_answer(done[0], asked.pop(done[0])))
    return sorted(answers, key=lambda answer: answer.node)


def _answer(ref: Any, name: str) -> Answer:
    now = time.time()
    try:
        facts: NodeFacts = ray.get(ref)
    except Exception as error:
        reason = str(error).strip().splitlines()
        return Answer(name, None, reason[-1] if reason else type(error).__name__)
    return Answer(name, facts, clock_gap_s=facts.clock_s - now)
