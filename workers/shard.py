"""One rank's share of a model with its share of the cache: all of it where there is one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cluster.core.config import WorkerConfig
from cluster.core.plan import StepPlan, StepResult
from workers import kvcache, memory
from workers.attention.registry import make_attention
from workers.blockmoves import BlockMover
from workers.inputs import InputBuilder, InputLimits
from workers.models.registry import load_model
from workers.parallel.collectives import Collectives
from workers.resolved import Resolved
from workers.runner import LoadedModel, ModelRunner
from workers.sequences import SequenceTable

Progress = Callable[[str, float], None]
"""Called with the stage of loading ("weights", "cache") and its share done, 0 to 1."""


class ModelShard:
    """Runs plans, in the calling thread. weight_bytes: as held in memory by this rank.
    num_blocks: of KV cache."""

    def __init__(self, runner: ModelRunner, weight_bytes: int, num_blocks: int) -> None:
        self._runner = runner
        self.weight_bytes = weight_bytes
        self.num_blocks = num_blocks

    def run(self, plan: StepPlan) -> StepResult:
        """Every rank of a group runs every plan; rank 0's result counts. Raises RuntimeError for
        a malformed plan, GroupBroken when another rank fails."""
        started = time.perf_counter()
        result = self._runner.run(plan)
        result.elapsed_s = time.perf_counter() - started
        return result


def load_shard(
    config: WorkerConfig,
    chosen: Resolved,
    collectives: Collectives,
    progress: Progress,
    host_blocks: int,
) -> ModelShard:
    """Load weights and allocate the cache. host_blocks: blocks that host memory can take when
    sequences are swapped out. The checkpoint is closed.

    Raises ModelError for a folder that cannot be served, ConfigError for a configuration
    that does not fit the model or the machine.
    """
    checkpoint, device = chosen.checkpoint, chosen.device
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    attention = make_attention(config.attention_backend, chosen.spec)
    model = load_model(
        checkpoint, chosen.dtype, device, lambda share: progress("weights", share), collectives
    )
    checkpoint.close()
    num_blocks = kvcache.choose_num_blocks(
        config, chosen.shape, chosen.max_model_len, memory.free_memory(device)
    )
    caches = kvcache.allocate(chosen.shape, num_blocks, device)
    progress("cache", 1.0)
    table = SequenceTable(
        config.max_num_seqs, chosen.max_model_len, config.block_size, checkpoint.config.vocab_size
    )
    limits = InputLimits(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
    runner = ModelRunner(
        LoadedModel(model, attention, caches),
        table,
        InputBuilder(table, limits, device),
        BlockMover(caches, host_blocks),
        collectives,
    )
    return ModelShard(runner, model.weight_bytes, num_blocks)
