"""All layers in one compiled call give the bits that each layer by itself gives."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.sampling import SamplingParams
from tests.determinism.families import FAMILIES, write_family
from tests.determinism.plan_driver import Driving, Request
from tests.determinism.thread_ranks import Seen, drive_ranks
from tests.unit.workers.parallel.test_collectives import shared_memory_groups
from workers.attention.native_backend import NativeAttention
from workers.inputs import StepInputs
from workers.models import compiled
from workers.native.build import BuildError
from workers.parallel import executor as group_executor
from workers.passes import EagerPasses

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def requests() -> list[Request]:
    chooser = random.Random(5)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    lengths = [1, 3, 16, 45, 70]
    return [Request([chooser.randrange(131) for _ in range(n)], sampling) for n in lengths]


def drive(folder, dtype: str, size: int) -> Seen:
    """Chunks and decodes side by side, steps without logits, and replays."""
    config = WorkerConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        attention_backend="native",
        num_blocks=60,
        block_size=16,
        max_num_batched_tokens=32,
        threads=2,
    )
    return drive_ranks(config, size, Driving(budget=24, batch=4, replay_every=5), requests())


@pytest.fixture
def shared_memory(monkeypatch):
    """The ranks' threads exchange as processes do."""
    monkeypatch.setattr(group_executor, "thread_groups", shared_memory_groups)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How many steps went which way."""
    found: Counter[str] = Counter()
    for kind in (compiled.CompiledLayers, compiled.EachLayer):
        plain = kind.__call__

        def counting(self, *arguments, plain=plain, name=kind.__name__):
            found[name] += 1
            return plain(self, *arguments)

        monkeypatch.setattr(kind, "__call__", counting)
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_equal_each_layer(name, dtype, size, tmp_path, monkeypatch, shared_memory, calls):
    folder = write_family(tmp_path / "model", name, DTYPES[dtype])
    try:
        whole = drive(folder, dtype, size)
    except BuildError as error:
        pytest.skip(str(error))
    if not calls["CompiledLayers"]:
        pytest.skip("no kernels for this dtype at this machine's level")
    assert not calls["EachLayer"]
    monkeypatch.setattr(NativeAttention, "native_step", lambda self: None)
    each = drive(folder, dtype, size)
    assert calls["EachLayer"]
    assert whole.tokens == each.tokens
    for here, there in zip(whole.logits, each.logits, strict=True):
        assert torch.equal(here, there)


def test_logits_may_be_wanted_more_than_once(tmp_path, monkeypatch, calls):
    """More of them than there are tokens."""
    folder = write_family(tmp_path / "model", "llama")
    plain = EagerPasses.logits

    def repeated(passes: EagerPasses, step: StepInputs) -> torch.Tensor | None:
        wanted = step.batch.logits_index
        many = step.batch._replace(logits_index=wanted.repeat(40))
        logits, again = plain(passes, step), plain(passes, replace(step, batch=many))
        assert torch.equal(again, logits.repeat(40, 1))
        return logits

    monkeypatch.setattr(EagerPasses, "logits", repeated)
    drive(folder, "float32", 1)
    if not calls["CompiledLayers"]:
        pytest.skip("no kernels at this machine's level")
