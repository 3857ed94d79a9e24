"""The next step submitted before the ids of the one before are read, and decodes as graphs: the
same tokens as one step after the other, launched operator by operator."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.core.lifecycle import State
from cluster.core.outcome import FinishReason
from cluster.core.policies import BATCHING, PolicyChoice
from cluster.core.preemption import SwapCosts
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Scheduler
from tests.determinism.overlap_support import Lagging, Served, open_executor, serve, use_graphs
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executor import LocalExecutor

VOCAB = 128
SEQS, BUDGET = 6, 48
LIMITS = {"max_num_seqs": SEQS, "max_num_batched_tokens": BUDGET, "num_blocks": 400}
SMALL_POOL = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TinyLlama())


def requests() -> list[EngineRequest]:
    """Of every kind: what ids decide (stops, penalties, scores) and what they do not."""
    chooser = random.Random(5)
    stem = [chooser.randrange(VOCAB) for _ in range(20)]
    stops = tuple(range(0, VOCAB, 6))
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "stop_token_ids": stops},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "stop_token_ids": stops, "min_tokens": 6},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 30},
        # Two tokens in turns: each draw depends on the id of the one before.
        {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": ((7, 50.0), (8, 49.0))},
        {"temperature": 1.0, "seed": 6, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "logit_bias": ((7, 30.0),), "max_tokens": 1},
    ]
    asked = []
    for number in range(18):
        params = {"max_tokens": 4 + 2 * number, **kinds[number % len(kinds)]}
        length = chooser.randint(1, 40)
        prompt = [chooser.randrange(VOCAB) for _ in range(length)]
        shared = stem if number % 3 == 0 else []
        asked.append(EngineRequest(tuple(shared + prompt), SamplingParams(**params)))
    return asked


@pytest.fixture(scope="module")
def truth(folder: Path) -> Served:
    executor = open_executor(LocalExecutor, folder, 0, **LIMITS)
    served = serve(executor, requests(), PolicyChoice(), SEQS, BUDGET)
    assert FinishReason.STOP in served.finishes
    return served


def same(served: Served, truth: Served) -> None:
    assert served.outputs == truth.outputs
    assert served.finishes == truth.finishes
    for ours, theirs in zip(served.logprobs, truth.logprobs, strict=True):
        assert [e.token_id for e in ours] == [e.token_id for e in theirs]
        assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)
    assert served.prompt_logprobs.keys() == truth.prompt_logprobs.keys()
    assert all(len(e) == len(truth.prompt_logprobs[n]) for n, e in served.prompt_logprobs.items())


CHOICES = {
    **{name: PolicyChoice(name) for name in BATCHING if name != "dynamic"},
    "short": PolicyChoice(reservation="on-demand", victims="last-admitted"),
    "swap": PolicyChoice(
        reservation="on-demand",
        preemption="swap",
        host_blocks=64,
        swap_costs=SwapCosts(1.0, 1e9),
        prefix_cache="on",
    ),
}


@pytest.mark.parametrize("graphs", ["eager", "graphs"])
@pytest.mark.parametrize("name", CHOICES)
def test_overlapped_steps_change_nothing(folder, truth, name, graphs):
    choice = CHOICES[name]
    limits = LIMITS | ({"num_blocks": SMALL_POOL} if name in ("short", "swap") else {})
    executor = open_executor(Lagging, folder, choice.host_blocks, **limits)
    if graphs == "graphs":
        capturer = use_graphs(executor, SEQS)
    served = serve(executor, requests(), choice, SEQS, BUDGET)
    same(served, truth)
    assert served.scheduler.counters.wasted_rows > 0
    if name in ("short", "swap"):
        assert served.scheduler.counters.preemptions > 0
    if graphs == "graphs":
        assert capturer.captured == len({1, 2, 4, SEQS})
        assert capturer.replayed > 10


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_graphs_of_serial_steps_change_nothing(folder, truth, backend):
    executor = open_executor(LocalExecutor, folder, 0, **LIMITS, attention_backend=backend)
    capturer = use_graphs(executor, SEQS)
    same(serve(executor, requests(), PolicyChoice(), SEQS, BUDGET), truth)
    assert capturer.replayed > 10


@pytest.mark.parametrize("seed", range(4))
def test_pauses_while_steps_are_under_way_change_nothing(folder, truth, seed):
    """A sequence that leaves and comes back finds another lane, or its own, with a stale id."""
    chooser = random.Random(seed)

    def disturb(scheduler: Scheduler, step: int) -> None:
        for sequence in scheduler.sequences():
            if sequence.state is State.PAUSED:
                scheduler.resume(sequence.seq_id)
            elif chooser.random() < 0.05 and step < 150:
                scheduler.pause(sequence.seq_id)
                if chooser.random() < 0.5:
                    scheduler.resume(sequence.seq_id)

    executor = open_executor(Lagging, folder, 0, **LIMITS)
    use_graphs(executor, SEQS)
    choice = PolicyChoice(prefix_cache=("off", "on")[seed % 2])
    served = serve(executor, requests(), choice, SEQS, BUDGET, disturb)
    same(served, truth)
    assert served.scheduler.counters.recomputed_tokens > 0
