"""The executor that runs the model in its own process (the Executor protocol of the engine)."""

from __future__ import annotations

import logging
from dataclasses import replace

from cluster.core.config import WorkerConfig
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan
from workers import memory
from workers.parallel.collectives import Alone
from workers.placement import dtype_name
from workers.resolved import Resolved, resolve
from workers.shard import ModelShard, Progress, TimedStep, load_shard

logger = logging.getLogger(__name__)


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
        chosen = resolve(config, host_blocks)
        shard = load_shard(config, chosen, Alone(), progress or no_progress, host_blocks)
        self._shard: ModelShard | None = shard
        self._info = model_info(chosen, shard.num_blocks, shard.weight_bytes)
        log_memory(self._info)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pipeline_depth(self) -> int:
        """On a GPU a step only has to be queued, and its ids can be read while the next one runs.
        On a CPU the thread that would plan meanwhile is the one that computes."""
        return 2 if self._info.device.startswith("cuda") else 1

    def submit(self, plan: StepPlan) -> TimedStep:
        """Start the step. Raises RuntimeError for a malformed plan and after `close`."""
        if self._shard is None:
            raise RuntimeError(f"plan {plan.step}: the executor is closed")
        return self._shard.submit(plan)

    def problem(self) -> str | None:
        """Nothing can break it between steps."""
        return None

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
        self._shard = None


def no_progress(stage: str, share: float) -> None:
    """For callers that do not ask."""


def settle(config: WorkerConfig, chosen: Resolved) -> WorkerConfig:
    """The configuration with the number of blocks settled."""
    return replace(config, num_blocks=chosen.num_blocks)


def model_info(chosen: Resolved, num_blocks: int, weight_bytes: int) -> ModelInfo:
    """kv_bytes_per_token and weight_bytes are of all ranks together."""
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
        kv_bytes_per_token=chosen.shape.bytes_per_token * chosen.shard.size,
        weight_bytes=weight_bytes,
        tokenizer=checkpoint.tokenizer(),
    )


def log_memory(info: ModelInfo) -> None:
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
