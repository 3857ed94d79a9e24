"""The embedded model against transformers: the same tokenizer, and the same tokens in fp32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from workers import manifest
from workers.executor import LocalExecutor
from workers.pull import MODEL_NAME, default_cache_dir, verify

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.model

OUTPUT_TOKENS = 12
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about trains.",
    "List three prime numbers.",
    "Explain what a KV cache is to a child.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Name the planets of the solar system.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
]
TEXTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "안녕하세요. 오늘은",
    "🎉🎉🎉",
    "A",
    "In 1969, the first humans",
    "<html>\n<head>\n",
    "Dear Sir or Madam,\n\nI am writing to",
]
STRINGS = [
    *QUESTIONS,
    *TEXTS,
    "",
    "  two  spaces ",
    "\n\n\t",
    "naïve café",
    "日本語 テスト",
    "x1y22z333",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = default_cache_dir() / "models" / MODEL_NAME
    if manifest.objection(path) is not None:
        pytest.skip(f"no embedded model at {path}")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def requests(tokenizer) -> list[Request]:
    sampling = SamplingParams(
        max_tokens=OUTPUT_TOKENS, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,)
    )
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    plain = [tokenizer.encode(text) for text in TEXTS]
    return [Request(list(prompt), sampling) for prompt in [*chats, *plain]]


@pytest.fixture(scope="module")
def executor(folder):
    executor = LocalExecutor(
        WorkerConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            num_blocks=400,
            max_num_batched_tokens=4096,
        )
    )
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def outputs(executor, requests) -> list[list[int]]:
    return PlanDriver(executor, Driving(budget=4096, batch=16)).run(requests)


def test_checksums(folder):
    verify(folder)


def test_every_token_is_the_one_transformers_prefers(folder, requests, outputs):
    """One forward pass over prompt and output: if each token is the argmax of what precedes it,
    transformers' own greedy decoding gives the same text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for request, output in zip(requests, outputs, strict=True):
            tokens = request.prompt + output
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            preferred = logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
            assert preferred == output


def test_it_knows_the_capital_of_france(tokenizer, outputs):
    assert tokenizer.decode(outputs[0]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    "driving",
    [
        Driving(budget=16, batch=16),
        Driving(budget=64, batch=16, replay_every=5, seed=1),
        Driving(budget=512, batch=16, seed=2),
        Driving(budget=512, batch=1),
    ],
    ids=lambda d: f"budget{d.budget}-batch{d.batch}-replay{d.replay_every}",
)
def test_tokens_do_not_depend_on_how_the_work_is_cut(executor, requests, outputs, driving):
    assert PlanDriver(executor, driving).run(requests) == outputs


def test_tokenizer_file_alone_gives_what_transformers_gives(folder, tokenizer):
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert alone.encode(text, add_special_tokens=False).ids == ids
        assert alone.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_random_unicode_round_trips(tokenizer):
    chooser = random.Random(3)
    for _ in range(200):
        points = [
            chooser.choice([chooser.randrange(32, 0x250), chooser.randrange(0xAC00, 0xD7A4)])
            for _ in range(20)
        ]
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone(tokenizer):
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
