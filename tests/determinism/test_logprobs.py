"""Log-probabilities of outputs and prompts, against transformers and against the solo run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config import SchedulerConfig, WorkerConfig
from cluster.core.plan import TokenLogprob
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executor import LocalExecutor

transformers = pytest.importorskip("transformers")

PROMPT = [7 * i % 128 for i in range(1, 52)]
TOP = 4
OUTPUT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TinyLlama())


class Served:
    """One engine at a given budget; `preempt_at` steps preempt whatever runs."""

    def __init__(self, folder: Path, budget: int, choice: PolicyChoice | None = None) -> None:
        worker = WorkerConfig(
            str(folder),
            "float32",
            "cpu",
            block_size=4,
            num_blocks=200,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
        )
        self.executor = LocalExecutor(worker)
        config = SchedulerConfig(budget, 4, 4, 200, 512)
        self.scheduler = make_scheduler(config, choice or PolicyChoice())

    def run(
        self, prompts: list[list[int]], preempt_at: tuple[int, ...] = ()
    ) -> list[tuple[list[TokenLogprob], list[TokenLogprob]]]:
        """(prompt entries, output entries) per prompt."""
        sampling = SamplingParams(
            max_tokens=OUTPUT, temperature=0.0, logprobs=TOP, prompt_logprobs=TOP
        )
        ids = [self.scheduler.add(EngineRequest(tuple(p), sampling), 0.0).seq_id for p in prompts]
        seen: dict[int, tuple[list[TokenLogprob], list[TokenLogprob]]] = {i: ([], []) for i in ids}
        step = 0
        while True:
            step += 1
            if step in preempt_at:
                for sequence in list(self.scheduler.running):
                    self.scheduler._preempt(sequence)
            plan = self.scheduler.plan(0.0)
            if plan is None:
                return [seen[i] for i in ids]
            done = self.scheduler.commit(self.executor.submit(plan).wait())
            for seq_id, entries in done.prompt_logprobs.items():
                seen[seq_id][0].extend(entries)
            for seq_id, entry in done.logprobs.items():
                seen[seq_id][1].append(entry)


@torch.inference_mode()
def truth(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens), vocab] of what follows each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_close(ours: list[TokenLogprob], theirs: list[TokenLogprob]) -> None:
    assert [e.token_id for e in ours] == [e.token_id for e in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in mine.top] == [i for i, _ in other.top]


def test_they_equal_those_of_transformers(folder):
    ((prompt, output),) = Served(folder, 64).run([PROMPT])
    whole = PROMPT + [entry.token_id for entry in output]
    expected = truth(folder, whole)
    entries = [*prompt, *output]
    assert [e.token_id for e in entries] == whole[1:]
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        values, ids = row.topk(TOP)
        assert [i for i, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert len(entry.top) == TOP


@pytest.mark.parametrize("preempt_at", [(), (2,), (3,), (2, 4)])
def test_one_entry_per_position_over_three_chunks_with_a_preemption(folder, preempt_at):
    """R21: prompt log-probabilities over three chunks with a preemption equal the solo run."""
    (solo,) = Served(folder, 64).run([PROMPT])
    chunked = Served(folder, 17).run([PROMPT, PROMPT[::-1], PROMPT[5:]], preempt_at)
    prompt, output = chunked[0]
    assert len(prompt) == len(PROMPT) - 1
    assert_close(prompt, solo[0])
    assert_close(output, solo[1])
    for (entries, _), asked in zip(chunked[1:], [PROMPT[::-1], PROMPT[5:]], strict=True):
        assert [e.token_id for e in entries] == asked[1:]


def test_a_shared_prefix_does_not_leave_positions_unscored(folder):
    served = Served(folder, 64, PolicyChoice(prefix_cache="on"))
    (first,) = served.run([PROMPT])
    (again,) = served.run([PROMPT])
    assert_close(again[0], first[0])
    assert len(again[0]) == len(PROMPT) - 1
