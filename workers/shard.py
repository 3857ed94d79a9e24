"""One rank's share of a model with its share of the cache: all of it where there is one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cluster.core.config import WorkerConfig
from cluster.core.plan import StepPlan, StepResult
from workers import kvcache, memory
from workers.attention.registry import make_attention
from workers.blockmoves import BlockMover
from workers.cores import settle_on_cores
from workers.feed import TokenFeed
from workers.graphs import CudaCapturer, DecodeGraphs
from workers.inputs import InputBuilder, InputLimits
from workers.models.registry import load_model
from workers.parallel.collectives import Collectives
from workers.passes import EagerPasses, LoadedModel, Passes
from workers.resolved import Resolved
from workers.runner import ModelRunner, RunningStep
from workers.sequences import SequenceTable

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage of loading ("weights", "cache") and its share done, 0 to 1."""


class TimedStep:
    """A step under way, and how long it took."""

    def __init__(self, running: RunningStep, done: Callable[[], float]) -> None:
        """done: called when it is; returns seconds."""
        self._running = running
        self._done = done

    def wait(self) -> StepResult:
        """Read what was sampled."""
        result = self._running.wait()
        result.elapsed_s = self._done()
        return result


class ModelShard:
    """Runs plans, in the calling thread. weight_bytes: as held in memory by this rank.
    num_blocks: of KV cache."""

    def __init__(self, runner: ModelRunner, weight_bytes: int, num_blocks: int) -> None:
        self._runner = runner
        self._last_done_s = 0.0
        self.weight_bytes = weight_bytes
        self.num_blocks = num_blocks

    def submit(self, plan: StepPlan) -> TimedStep:
        """Every rank of a group runs every plan; rank 0's result counts. Raises RuntimeError for
        a malformed plan, GroupBroken when another rank fails."""
        started_s = time.perf_counter()
        running = self._runner.submit(plan)

        def done() -> float:
            # While the step before ran, this one only waited.
            began_s = max(started_s, self._last_done_s)
            self._last_done_s = time.perf_counter()
            return self._last_done_s - began_s

        return TimedStep(running, done)

    def run(self, plan: StepPlan) -> StepResult:
        """submit() and wait for it."""
        return self.submit(plan).wait()


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
        settle_on_cores(config.cores, config.threads)
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
    inputs = InputBuilder(table, limits, device)
    feed = TokenFeed(config.max_num_seqs, device)
    eager = EagerPasses(LoadedModel(model, attention, caches), feed)
    captures = device.type == "cuda" and attention.capabilities.graph_safe
    passes: Passes = eager
    if captures and collectives.shard.size == 1 and config.decode_graphs != "off":
        passes = _graphs(eager, inputs, config.max_num_seqs)
    runner = ModelRunner(passes, table, inputs, BlockMover(caches, host_blocks), feed, collectives)
    return ModelShard(runner, model.weight_bytes, num_blocks)


def _graphs(eager: EagerPasses, inputs: InputBuilder, max_num_seqs: int) -> Passes:
    """Captured before the first request comes. Eager passes where that does not work."""
    graphs = DecodeGraphs(eager, CudaCapturer(), max_num_seqs)
    try:
        graphs.prepare(inputs)
    except RuntimeError as error:
        logger.warning("decode steps run without CUDA graphs: %s", error)
        return eager
    return graphs
