"""A step on the compiled kernels leaves no thread spinning: it would take the next step's cores."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cluster.core.sampling import SamplingParams
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.bench_cpu.steps import DecodeBatch, StepCase
from workers.native import bindings
from workers.native.build import find_compiler
from workers.sampler import Draw, sample

STEPS, PAUSE_S, MOST_MS = 10, 0.02, 1.0
"""OpenMP's threads spin for 5 ms after an operator that had something for them."""

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no compiler here"),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="nobody tells threads' times"),
]


def others_ms() -> float:
    """CPU time of all threads but this one."""
    own, total = threading.get_native_id(), 0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) == own:
            continue
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    return total / 1e6


def spent_beside_ms(work) -> float:
    """Per call, by other threads, beyond the call's own time: what they go on with afterwards."""
    work()
    time.sleep(PAUSE_S)
    before, during = others_ms(), 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        work()
        during += 1e3 * (time.perf_counter() - start)
        time.sleep(PAUSE_S)
    return (others_ms() - before - during) / STEPS


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_decode_step(dtype, tmp_path, two_threads):
    if not bindings.load_kernels(getattr(torch, dtype)).can_linear(64, 96):
        pytest.skip("oneDNN multiplies here, on OpenMP's threads")
    model = write_model(tmp_path / "tiny", TinyLlama(vocab=1024, max_len=64, head_dim=64))
    batch = DecodeBatch(model, dtype, "native", StepCase(batch=16, context=20, prompt=16), 20)
    assert spent_beside_ms(batch.step) < MOST_MS


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}],
    ids=str,
)
def test_after_sampling(sampling, two_threads):
    logits = 3 * torch.randn(16, 49_152, generator=torch.Generator().manual_seed(1))
    draws = [Draw(SamplingParams(max_tokens=8, seed=row, **sampling), 0) for row in range(16)]
    assert spent_beside_ms(lambda: sample(logits, draws)) < MOST_MS


def test_the_measure_sees_what_spins():
    def spin() -> None:
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass

    with ThreadPoolExecutor(1) as pool:
        assert spent_beside_ms(lambda: pool.submit(spin)) > MOST_MS
