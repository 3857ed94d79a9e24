"""Decode graphs and overlapped steps on a card: the tokens of serial, eager steps."""

from __future__ import annotations

import random

import pytest

from cluster.core.config import WorkerConfig
from cluster.core.policies import PolicyChoice
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from tests.determinism.overlap_support import BLOCK, serve
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executor import LocalExecutor
from workers.graphs import DecodeGraphs

SEQS, BUDGET = 6, 64


class Serial(LocalExecutor):
    pipeline_depth = 1


def requests(vocab: int) -> list[EngineRequest]:
    chooser = random.Random(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, vocab, 7))},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 2, "frequency_penalty": 1.0},
    ]
    asked = []
    for number in range(15):
        prompt = [chooser.randrange(vocab) for _ in range(chooser.randint(1, 90))]
        params = SamplingParams(max_tokens=3 + 2 * number, **kinds[number % len(kinds)])
        asked.append(EngineRequest(tuple(prompt), params))
    return asked


@pytest.mark.parametrize("num_blocks", [400, 60], ids=["roomy", "preempting"])
def test_graphs_and_overlap_change_nothing(tmp_path, num_blocks):
    spec = TinyLlama(head_dim=32, heads=6, kv_heads=2, seed=3)
    folder = write_model(tmp_path, spec)
    outputs = []
    for executor_type, graphs in ((Serial, "off"), (Serial, "auto"), (LocalExecutor, "auto")):
        config = WorkerConfig(
            str(folder),
            dtype="float32",
            device="cuda",
            attention_backend="triton",
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_seqs=SEQS,
            max_num_batched_tokens=BUDGET,
            decode_graphs=graphs,
        )
        executor = executor_type(config)
        captured = isinstance(executor._shard._runner._passes, DecodeGraphs)
        assert captured is (graphs == "auto")
        choice = PolicyChoice(reservation="on-demand")
        outputs.append(serve(executor, requests(spec.vocab), choice, SEQS, BUDGET).outputs)
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    assert LocalExecutor.pipeline_depth.fget(executor) == 2
