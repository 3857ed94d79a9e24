"""The worker against transformers on the same weights: same tokens however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executor import LocalExecutor

transformers = pytest.importorskip("transformers")

OUTPUT_TOKENS = 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "untied": (TinyLlama(), 1),
    "tied-sharded": (TinyLlama(tied=True, seed=1), 3),
    "multi-head": (TinyLlama(kv_heads=4, seed=2), 1),
    "one-kv-head": (TinyLlama(kv_heads=1, head_dim=32, seed=3), 1),
    "bias": (TinyLlama(biased=True, seed=4), 2),
    "odd-sizes": (TinyLlama(vocab=131, hidden=60, intermediate=70, heads=3, kv_heads=3, seed=5), 1),
    "linear-old-keys": (TinyLlama(rope={"rope_scaling": {"type": "linear", "factor": 4.0}}), 1),
    "llama3-old-keys": (TinyLlama(rope={"rope_scaling": LLAMA3, "rope_theta": 500000.0}), 1),
    "llama3-new-keys": (
        TinyLlama(rope={"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, seed=6),
        1,
    ),
}


def prompts(vocab: int, count: int = 16) -> list[list[int]]:
    chooser = random.Random(7)
    return [
        [chooser.randrange(vocab) for _ in range(chooser.choice([1, 2, 15, 16, 17, 40, 130]))]
        for _ in range(count)
    ]


def greedy_requests(vocab: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    return [Request(prompt, sampling) for prompt in prompts(vocab)]


@torch.inference_mode()
def oracle_tokens(folder: Path, prompt_list: list[list[int]], count: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompt_list:
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def served(request, tmp_path_factory):
    spec, shards = MODELS[request.param]
    if "rope_parameters" in spec.rope and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("this transformers does not read rope_parameters")
    folder = write_model(tmp_path_factory.mktemp("tiny"), spec, shards)
    executor = LocalExecutor(
        WorkerConfig(
            model=str(folder),
            device="cpu",
            block_size=16,
            num_blocks=200,
            max_num_batched_tokens=4096,
        )
    )
    yield executor, oracle_tokens(folder, prompts(spec.vocab), OUTPUT_TOKENS)
    executor.close()


@pytest.mark.parametrize(
    "driving",
    [
        Driving(budget=16, batch=16),
        Driving(budget=64, batch=16, seed=1),
        Driving(budget=512, batch=16),
        Driving(budget=4096, batch=16),
        Driving(budget=16, batch=1),
        Driving(budget=4096, batch=1),
        Driving(budget=16, batch=16, replay_every=3),
        Driving(budget=64, batch=5, replay_every=5, seed=2),
        Driving(budget=4096, batch=16, replay_every=1),
    ],
    ids=lambda d: f"budget{d.budget}-batch{d.batch}-replay{d.replay_every}",
)
def test_greedy_tokens_equal_transformers(served, driving):
    executor, expected = served
    requests = greedy_requests(executor.info.vocab_size)
    assert PlanDriver(executor, driving).run(requests) == expected


def test_sampled_tokens_do_not_depend_on_batch_budget_or_replay(served):
    executor, _ = served
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.0},
    ]
    requests = [
        Request(prompt, SamplingParams(max_tokens=12, seed=n, **kinds[n % 4]))
        for n, prompt in enumerate(prompts(executor.info.vocab_size))
    ]
    runs = [
        PlanDriver(executor, driving).run(requests)
        for driving in (
            Driving(budget=4096, batch=16),
            Driving(budget=4096, batch=1),
            Driving(budget=16, batch=7, replay_every=2, seed=3),
        )
    ]
    assert runs[0] == runs[1] == runs[2]


def test_several_block_sizes_give_the_same_tokens(tmp_path):
    spec = TinyLlama(seed=8)
    folder = write_model(tmp_path, spec)
    expected = oracle_tokens(folder, prompts(spec.vocab), OUTPUT_TOKENS)
    for block_size in (1, 5, 32, 256):
        executor = LocalExecutor(
            WorkerConfig(model=str(folder), device="cpu", block_size=block_size, max_model_len=256)
        )
        driving = Driving(budget=100, batch=16, replay_every=4)
        assert PlanDriver(executor, driving).run(greedy_requests(spec.vocab)) == expected


def test_attention_backends_give_the_same_tokens(tmp_path):
    """An engine may go on with what another began on a machine with other kernels."""
    spec = TinyLlama(seed=9)
    folder = write_model(tmp_path, spec)
    expected = oracle_tokens(folder, prompts(spec.vocab), OUTPUT_TOKENS)
    for backend in ("native", "torch"):
        config = WorkerConfig(model=str(folder), device="cpu", attention_backend=backend)
        executor = LocalExecutor(config)
        driving = Driving(budget=100, batch=16, replay_every=4)
        assert PlanDriver(executor, driving).run(greedy_requests(spec.vocab)) == expected
