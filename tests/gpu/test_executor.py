"""The whole worker on a card against the CPU: greedy tokens of the same fp32 weights are equal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.attention.registry import BACKENDS
from workers.executor import LocalExecutor
from workers.resolved import resolve


def requests(vocab: int) -> list[Request]:
    chooser = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 40, 130, 64, 3, 90]
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    prompts = [[chooser.randrange(vocab) for _ in range(length)] for length in lengths]
    return [Request(prompt, sampling) for prompt in prompts]


def emitted(folder: Path, spec: TinyLlama, driving: Driving, **settings) -> list[list[int]]:
    config = WorkerConfig(str(folder), num_blocks=200, **settings)
    executor = LocalExecutor(config)
    try:
        return PlanDriver(executor, driving).run(requests(spec.vocab))
    finally:
        executor.close()


@pytest.mark.parametrize("backend", ["auto", "flash", "triton", "torch"])
@pytest.mark.parametrize(
    "driving", [Driving(100, 16), Driving(24, 4, replay_every=5)], ids=["plain", "replays"]
)
def test_the_card_gives_the_tokens_of_the_cpu(tmp_path, backend, driving):
    spec = TinyLlama(head_dim=32, heads=6, kv_heads=2, seed=3)
    folder = write_model(tmp_path, spec)
    if backend != "auto":
        chosen = resolve(WorkerConfig(str(folder), device="cuda", num_blocks=8), 0)
        objection = BACKENDS[backend].objection(chosen.spec)
        chosen.checkpoint.close()
        if objection is not None:
            pytest.skip(objection)
    expected = emitted(folder, spec, Driving(100, 16), device="cpu", attention_backend="torch")
    computed = emitted(folder, spec, driving, device="cuda", attention_backend=backend)
    assert computed == expected
