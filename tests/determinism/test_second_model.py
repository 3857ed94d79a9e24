"""gemma-3-270m against transformers, for those who have accepted its terms and pulled it:
`headway pull gemma-3-270m --accept-terms`. Sliding windows, QK norm, a vocabulary of 262,144.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from cluster.text.tokenizer import Tokenizer
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from workers import manifest
from workers.executors import make_executor
from workers.pull import default_cache_dir
from workers.sources import GEMMA3_270M

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

OUTPUT_TOKENS = 12
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "日本の首都は",
    # Beyond the window of 512.
    "One, two, three, four, five, six, seven, eight, nine, ten. " * 40 + "One, two,",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = default_cache_dir() / "models" / GEMMA3_270M.name
    if manifest.objection(path) is not None:
        pytest.skip(f"{GEMMA3_270M.name} is not pulled; it has terms to accept")
    return path


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    ours = Tokenizer.from_folder(str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [list(ours.encode(text)) for text in TEXTS]
    assert prompts == [theirs.encode(text) for text in TEXTS]
    assert len(prompts[-1]) > 600
    return prompts


@pytest.fixture(scope="module")
def expected(folder, prompts) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None
            )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize(
    ("size", "backend", "budget"), [(1, "native", 4096), (1, "torch", 160), (2, "native", 300)]
)
def test_tokens_are_those_of_transformers(folder, prompts, expected, size, backend, budget):
    executor = make_executor(
        WorkerConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            attention_backend=backend,
            num_blocks=160,
            max_num_batched_tokens=4096,
            max_num_seqs=8,
            max_model_len=2048,
            tensor_parallel_size=size,
        )
    )
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    try:
        driver = PlanDriver(executor, Driving(budget=budget, batch=4, replay_every=5))
        assert driver.run([Request(prompt, sampling) for prompt in prompts]) == expected
    finally:
        executor.close()
