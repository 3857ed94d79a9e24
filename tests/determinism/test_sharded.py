"""A model cut for several ranks computes what the whole one computes, and reads its part only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import safetensors
import torch

from cluster.core.config import WorkerConfig
from tests.determinism.plan_driver import Driving
from tests.determinism.test_llama_oracle import (
    OUTPUT_TOKENS,
    greedy_requests,
    oracle_tokens,
    prompts,
)
from tests.determinism.thread_ranks import drive_ranks
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.checkpoint import folder as folder_module
from workers.models.registry import load_model, local_parameters, open_checkpoint
from workers.parallel.collectives import Shard
from workers.parallel.threads import ThreadGroup, thread_groups

MODELS = {
    "9 of 3": TinyLlama(hidden=72, heads=9, kv_heads=3, intermediate=100, vocab=131),
    "4 of 1": TinyLlama(heads=4, kv_heads=1, tied=True, seed=1),
    "8 of 2": TinyLlama(heads=8, kv_heads=2, biased=True, seed=2),
}
SIZES = (2, 3, 4)
CPU = torch.device("cpu")


def config(folder: Any, backend: str = "torch", dtype: str = "float32") -> WorkerConfig:
    return WorkerConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        attention_backend=backend,
        num_blocks=200,
        block_size=16,
        max_num_batched_tokens=4096,
    )


def steps(folder: Any, size: int, vocab: int, **options: str) -> tuple[list[Any], list[Any]]:
    """Tokens, and the logits of every step."""
    driving = Driving(budget=100, batch=16)
    seen = drive_ranks(config(folder, **options), size, driving, greedy_requests(vocab))
    return seen.tokens, seen.logits


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def model(request, tmp_path_factory):
    spec = MODELS[request.param]
    folder = write_model(tmp_path_factory.mktemp("tiny"), spec, shards=2)
    return spec, folder, steps(folder, 1, spec.vocab)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_ranks_compute_what_one_computes(model, size, backend):
    spec, folder, (tokens, logits) = model
    found_tokens, found = steps(folder, size, spec.vocab, backend=backend)
    assert found_tokens == tokens
    for here, there in zip(found, logits, strict=True):
        torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


def test_one_rank_gives_the_tokens_of_transformers(model):
    spec, folder, (tokens, _) = model
    assert tokens == oracle_tokens(folder, prompts(spec.vocab), OUTPUT_TOKENS)


def test_all_ranks_hold_the_same_sums(model, monkeypatch):
    """The residual stream is nowhere corrected: ranks that differ in a bit would drift apart."""
    spec, folder, _ = model
    sums: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    plain = ThreadGroup.all_reduce

    def recording(group: ThreadGroup, x: torch.Tensor) -> torch.Tensor:
        total = plain(group, x)
        sums[group.shard.rank].append(total.clone())
        return total

    monkeypatch.setattr(ThreadGroup, "all_reduce", recording)
    steps(folder, 3, spec.vocab, dtype="bfloat16")
    assert sums[0]
    for ranks in zip(*sums.values(), strict=True):
        assert all(torch.equal(ranks[0], other) for other in ranks[1:])


@pytest.mark.parametrize("size", SIZES)
def test_bf16_is_near(model, size):
    spec, folder, (_, logits) = model
    _, found = steps(folder, size, spec.vocab, dtype="bfloat16")
    torch.testing.assert_close(found[0].float(), logits[0], atol=0.6, rtol=0.05)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_reads_its_part_only(tmp_path, monkeypatch, size):
    """Everything that may be read is counted; what is split is read once by all ranks together,
    but for KV heads that several ranks hold."""
    spec = MODELS["9 of 3"]
    folder = write_model(tmp_path, spec)
    read = count_reads(monkeypatch)
    for group in thread_groups(size):
        load_model(open_checkpoint(str(folder)), torch.float32, CPU, lambda _: None, group)
    for name, tensor in spec.tensors().items():
        times = size if "norm" in name else 1
        assert read[name] == times * tensor.numel(), name


@pytest.mark.parametrize("size", SIZES)
def test_memory_of_a_rank_is_told_before_and_after_loading(model, size):
    spec, folder, _ = model
    for group in thread_groups(size):
        checkpoint = open_checkpoint(str(folder))
        loaded = load_model(checkpoint, torch.float32, CPU, lambda _: None, group)
        announced = 4 * local_parameters(checkpoint, group.shard)
        # The summed biases are on the first rank alone; a packed tied head is a second copy.
        head = checkpoint.config.hidden_size * (spec.vocab + 16 * size) * 4 if spec.tied else 0
        biases = 8 * spec.layers * spec.hidden if spec.biased else 0
        assert announced - biases <= loaded.weight_bytes <= announced + head
        whole = 4 * local_parameters(checkpoint, Shard())
        assert announced < 0.75 * whole


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Elements read of each tensor, from here on."""
    read: Counter[str] = Counter()

    class Slice:
        def __init__(self, inner: Any, name: str) -> None:
            self._inner, self._name = inner, name

        def __getitem__(self, selected: Any) -> torch.Tensor:
            part = self._inner[selected]
            read[self._name] += part.numel()
            return part

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._inner = safetensors.safe_open(*args, **options)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self._inner.get_tensor(name)
            read[name] += tensor.numel()
            return tensor

        def get_slice(self, name: str) -> Slice:
            return Slice(self._inner.get_slice(name), name)

    monkeypatch.setattr(folder_module, "safe_open", File)
    return read
