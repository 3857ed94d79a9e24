"""The executor that runs the model in its own process (the Executor protocol of the engine)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult
from workers import kvcache, memory
from workers.attention.backend import AttentionSpec
from workers.attention.registry import make_attention
from workers.checkpoint.folder import Checkpoint
from workers.inputs import InputBuilder, InputLimits
from workers.models.registry import load_model, open_checkpoint
from workers.placement import choose_device, choose_dtype, dtype_name
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


class LocalExecutor:
    """Loads a model and runs its steps in the calling thread. Not thread-safe."""

    def __init__(self, config: WorkerConfig, progress: Progress | None = None) -> None:
        """Load weights and allocate the cache.

        Raises ModelError for a folder that cannot be served, ConfigError for a configuration
        that does not fit the model or the machine.
        """
        report = progress or _no_progress
        device = choose_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.threads)
        checkpoint = open_checkpoint(config.model)
        dtype = choose_dtype(config.dtype, checkpoint, device)
        max_model_len = _max_model_len(config, checkpoint)
        attention = make_attention(
            config.attention_backend, _attention_spec(config, checkpoint, dtype, device)
        )
        _check_weights_fit(checkpoint, dtype, device)
        model = load_model(checkpoint, dtype, device, lambda share: report("weights", share))
        checkpoint.close()
        shape = kvcache.cache_shape(checkpoint.config, config.block_size, dtype)
        num_blocks = kvcache.choose_num_blocks(
            config, shape, max_model_len, memory.free_memory(device)
        )
        caches = kvcache.allocate(shape, num_blocks, device)
        report("cache", 1.0)
        table = SequenceTable(
            config.max_num_seqs, max_model_len, config.block_size, checkpoint.config.vocab_size
        )
        limits = InputLimits(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
        self._runner: ModelRunner | None = ModelRunner(
            LoadedModel(model, attention, caches), table, InputBuilder(table, limits, device)
        )
        self._info = ModelInfo(
            name=checkpoint.folder.resolve().name,
            architecture=checkpoint.config.architecture,
            fingerprint=checkpoint.fingerprint(),
            dtype=dtype_name(dtype),
            device=str(device),
            vocab_size=checkpoint.config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_bytes_per_token=shape.bytes_per_token,
            weight_bytes=model.weight_bytes,
        )
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


def _max_model_len(config: WorkerConfig, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the limit of {checkpoint.folder}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len


def _check_weights_fit(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse before loading: a process that outgrows its memory is killed without a word."""
    needed, free = checkpoint.num_parameters * dtype.itemsize, memory.free_memory(device)
    if needed > free:
        raise ConfigError(
            f"model {checkpoint.folder} needs {needed} bytes as {dtype_name(dtype)}, but only "
            f"{free} are free on {device}"
        )


def _attention_spec(
    config: WorkerConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> AttentionSpec:
    model = checkpoint.config
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        scale=model.head_dim**-0.5,
        dtype=dtype,
        device=device,
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
