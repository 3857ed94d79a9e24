"""The executor that runs the model in its own process (the Executor protocol of the engine)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from cluster.core.config import WorkerConfig
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult
from workers import kvcache, memory
from workers.attention.registry import make_attention
from workers.blockmoves import BlockMover
from workers.inputs import InputBuilder, InputLimits
from workers.models.registry import load_model
from workers.placement import dtype_name
from workers.resolved import Resolved, resolve
from workers.runner import LoadedModel, ModelRunner
from workers.sequences import SequenceTable

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage of loading ("weights", "cache") and its share done, 0 to 1."""


class FinishedStep:
    """A step that ran when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


def check_config(config: WorkerConfig, host_blocks: int = 0) -> WorkerConfig:
    """Raise what `LocalExecutor` would raise, without loading any weight.

    Returns the configuration with the number of blocks settled, so that an engine that is started
    again later has as many as before, however much memory is free then.
    """
    chosen = resolve(config, host_blocks)
    chosen.checkpoint.close()
    return replace(config, num_blocks=chosen.num_blocks)


class LocalExecutor:
    """Loads a model and runs its steps in the calling thread. Not thread-safe."""

    def __init__(
        self, config: WorkerConfig, progress: Progress | None = None, host_blocks: int = 0
    ) -> None:
        """Load weights and allocate the cache. host_blocks: blocks that host memory can take
        when sequences are swapped out.

        Raises ModelError for a folder that cannot be served, ConfigError for a configuration
        that does not fit the model or the machine.
        """
        report = progress or _no_progress
        chosen = resolve(config, host_blocks)
        checkpoint, device = chosen.checkpoint, chosen.device
        if device.type == "cpu":
            torch.set_num_threads(config.threads)
        attention = make_attention(config.attention_backend, chosen.spec)
        model = load_model(checkpoint, chosen.dtype, device, lambda share: report("weights", share))
        checkpoint.close()
        num_blocks = kvcache.choose_num_blocks(
            config, chosen.shape, chosen.max_model_len, memory.free_memory(device)
        )
        caches = kvcache.allocate(chosen.shape, num_blocks, device)
        report("cache", 1.0)
        table = SequenceTable(
            config.max_num_seqs,
            chosen.max_model_len,
            config.block_size,
            checkpoint.config.vocab_size,
        )
        limits = InputLimits(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
        self._runner: ModelRunner | None = ModelRunner(
            LoadedModel(model, attention, caches),
            table,
            InputBuilder(table, limits, device),
            BlockMover(caches, host_blocks),
        )
        self._info = _model_info(chosen, num_blocks, model.weight_bytes)
        _log_memory(self._info)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run the step. Raises RuntimeError for a malformed plan and after `close`."""
        if self._runner is None:
            raise RuntimeError(f"plan {plan.step}: the executor is closed")
        started = time.perf_counter()
        result = self._runner.run(plan)
        result.elapsed_s = time.perf_counter() - started
        return FinishedStep(result)

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
        self._runner = None


def _no_progress(stage: str, share: float) -> None:
    """For callers that do not ask."""


def _model_info(chosen: Resolved, num_blocks: int, weight_bytes: int) -> ModelInfo:
    checkpoint = chosen.checkpoint
    return ModelInfo(
        name=checkpoint.folder.resolve().name,
        architecture=checkpoint.config.architecture,
        fingerprint=checkpoint.fingerprint(),
        dtype=dtype_name(chosen.dtype),
        device=str(chosen.device),
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=chosen.max_model_len,
        num_blocks=num_blocks,
        block_size=chosen.shape.block_size,
        kv_bytes_per_token=chosen.shape.bytes_per_token,
        weight_bytes=weight_bytes,
    )


def _log_memory(info: ModelInfo) -> None:
    kv_bytes = (info.num_blocks + 1) * info.block_size * info.kv_bytes_per_token
    logger.info(
        "loaded %s as %s on %s: weights %.1f MiB, KV cache %.1f MiB (%d blocks of %d tokens), "
        "resident %.1f MiB",
        info.name,
        info.dtype,
        info.device,
        info.weight_bytes / 2**20,
        kv_bytes / 2**20,
        info.num_blocks,
        info.block_size,
        memory.resident_bytes() / 2**20,
    )
