"""Every family against transformers: the same tokens, however the work is cut and on whatever."""

from __future__ import annotations

import random

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from tests.determinism.families import FAMILIES, greedy_tokens, oracle, write_family
from tests.determinism.plan_driver import Driving, Request
from tests.determinism.thread_ranks import Seen, drive_ranks

OUTPUT_TOKENS = 12
BACKENDS = ("torch", "native")


def prompts() -> list[list[int]]:
    chooser = random.Random(3)
    lengths = [1, 2, 15, 16, 17, 40, 90, 130]
    return [[chooser.randrange(131) for _ in range(length)] for length in lengths]


def requests(count: int = OUTPUT_TOKENS) -> list[Request]:
    sampling = SamplingParams(max_tokens=count, temperature=0.0)
    return [Request(prompt, sampling) for prompt in prompts()]


def drive(folder, driving: Driving, size: int = 1, **options: str) -> Seen:
    config = WorkerConfig(
        model=str(folder),
        device="cpu",
        num_blocks=200,
        block_size=16,
        max_num_batched_tokens=4096,
        **{"dtype": "float32", **options},
    )
    return drive_ranks(config, size, driving, requests())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = write_family(tmp_path_factory.mktemp("tiny"), request.param)
    model = oracle(folder)
    return folder, model, greedy_tokens(model, prompts(), OUTPUT_TOKENS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "driving",
    [
        Driving(budget=16, batch=8),
        Driving(budget=64, batch=8, replay_every=3),
        Driving(budget=4096, batch=8),
    ],
    ids=lambda d: f"budget{d.budget}-replay{d.replay_every}",
)
def test_greedy_tokens_equal_transformers(family, driving, backend):
    folder, _, expected = family
    assert drive(folder, driving, attention_backend=backend).tokens == expected


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_give_the_same_tokens(family, size, backend):
    folder, _, expected = family
    driving = Driving(budget=100, batch=8)
    assert drive(folder, driving, size, attention_backend=backend).tokens == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near(family, backend, dtype):
    folder, model, _ = family
    driving = Driving(budget=4096, batch=8)
    ranks = drive(folder, driving, attention_backend=backend, dtype=dtype)
    # The driver puts prompts of one token first.
    found, order = ranks.logits[0].float(), sorted(prompts(), key=lambda p: len(p) > 1)
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([p])).logits[0, -1] for p in order])
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        return
    error = (found - expected).abs() / expected.std()
    assert error.mean() < 0.03
    assert error.max() < 0.2


def test_fp16_weights_are_served_in_fp32(tmp_path):
    folder = write_family(tmp_path, "gemma3", torch.float16)
    expected = greedy_tokens(oracle(folder), prompts(), OUTPUT_TOKENS)
    assert drive(folder, Driving(budget=64, batch=8)).tokens == expected
