"""An executor whose ranks are threads: each holds its shard, the first one draws greedily."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from cluster.core.config import WorkerConfig
from cluster.core.plan import StepPlan, StepResult
from workers import kvcache
from workers.attention.backend import AttentionBackend, LayerCache
from workers.attention.registry import make_attention
from workers.executor import FinishedStep
from workers.inputs import InputBuilder, InputLimits
from workers.models.base import Model
from workers.models.registry import load_model
from workers.parallel.collectives import Alone, Collectives
from workers.parallel.threads import ThreadGroup, thread_groups
from workers.resolved import resolve
from workers.sequences import SequenceTable


@dataclass
class Rank:
    model: Model
    attention: AttentionBackend
    caches: list[LayerCache]
    table: SequenceTable
    inputs: InputBuilder


class ThreadRanks:
    """Runs the plans of a PlanDriver on `size` ranks. logits: of every step, in order, as the
    first rank returned them."""

    def __init__(self, config: WorkerConfig, size: int) -> None:
        self._groups: list[ThreadGroup] = thread_groups(size) if size > 1 else []
        groups: list[Collectives] = list(self._groups) or [Alone()]
        self._pool = ThreadPoolExecutor(size)
        self._ranks = list(self._pool.map(lambda group: _load(config, group), groups))
        self.info = SimpleNamespace(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
        )
        self.logits: list[torch.Tensor] = []

    def submit(self, plan: StepPlan) -> FinishedStep:
        futures = [self._pool.submit(self._step, rank, plan) for rank in self._ranks]
        outputs = [future.result(timeout=60) for future in futures]
        if not plan.rows:
            return FinishedStep(StepResult(plan.step, []))
        (_, lanes), *others = outputs
        logits = outputs[0][0]
        assert logits is not None
        assert all(other is None for other, _ in others)
        self.logits.append(logits)
        tokens = logits.argmax(-1).tolist()
        for rank in self._ranks:
            for lane, token in zip(lanes, tokens, strict=True):
                rank.table.settle(rank.table.expect(lane), token)
        return FinishedStep(StepResult(plan.step, tokens))

    def close(self) -> None:
        self._pool.shutdown()

    def _step(self, rank: Rank, plan: StepPlan) -> tuple[torch.Tensor | None, list[int]]:
        try:
            for seq_id in plan.released:
                rank.table.release(seq_id)
            for new in plan.admitted:
                rank.table.admit(new)
            if not plan.rows:
                return None, []
            step = rank.inputs.build(plan)
            with torch.inference_mode():
                rank.attention.plan(step.meta)
                logits = rank.model.forward(step.batch, rank.attention, rank.caches)
            return logits, step.lanes
        except BaseException:
            # Else the others would wait for this rank forever.
            for group in self._groups:
                group.give_up()
            raise


def _load(config: WorkerConfig, collectives: Collectives) -> Rank:
    chosen = resolve(config, 0, collectives.shard)
    attention = make_attention(config.attention_backend, chosen.spec)
    model = load_model(chosen.checkpoint, chosen.dtype, chosen.device, lambda _: None, collectives)
    num_blocks = chosen.num_blocks
    table = SequenceTable(
        config.max_num_seqs,
        chosen.max_model_len,
        config.block_size,
        chosen.checkpoint.config.vocab_size,
    )
    limits = InputLimits(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
    return Rank(
        model,
        attention,
        kvcache.allocate(chosen.shape, num_blocks, chosen.device),
        table,
        InputBuilder(table, limits, chosen.device),
    )
