"""Configuration: read once, frozen, refused with the limit and the value when impossible."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.core.errors import ConfigError

MAX_RANKS = 64
"""Of a tensor-parallel group; no model has more KV heads worth splitting."""


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold `tokens` positions."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine's scheduler.

    max_num_batched_tokens: tokens computed per step at most (the step's token budget).
    max_num_seqs: sequences running at once at most.
    block_size: KV positions per block. num_blocks: usable blocks (the null block is extra).
    max_model_len: prompt + output tokens of one sequence at most.
    watermark: share of the pool kept free when a sequence is admitted, so that the running
    ones can grow before the next preemption (1% to 5% cut preemptions several times over).
    max_preemptions: how often one sequence may be preempted before it is protected; 0 gives every
    sequence its whole life's blocks at admission, so that nothing is ever preempted.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_model_len: int
    watermark: float = 0.02
    max_preemptions: int = 4

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("max_preemptions", self.max_preemptions, 0)
        check_watermark(self.watermark)

    @property
    def watermark_blocks(self) -> int:
        return math.ceil(self.watermark * self.num_blocks)

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence (prompt + output) that this engine can ever finish."""
        return min(self.max_model_len, self.pool_tokens)


DECODE_GRAPHS = ("auto", "off")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker needs to load a model and allocate its KV cache.

    model: path of a Hugging Face folder. dtype: "auto" (as the weights were saved; fp16 becomes
    bf16 on CPU), "float32", "bfloat16" or "float16". device: "auto", "cpu" or "cuda".
    attention_backend: "auto" or a name of workers/attention/registry.py.
    num_blocks: usable KV blocks, or None to take `kv_memory_share` of the free memory.
    threads: intra-op threads on CPU; more than one only pays on cores that nobody else uses.
    cores: of a CPU worker's process: "" for any, a list like "2-5,7", or "auto" to claim one free
    physical core per thread, so that workers on one machine do not share any.
    max_model_len: None takes the model's own limit. tensor_parallel_size: ranks that share the
    model, each in a process of its own. collectives: how they exchange, "auto", "shm", "gloo",
    "nccl" or "local" (threads of one process, for tests). decode_graphs: "auto" (CUDA graphs for
    decode steps where device and attention allow it) or "off".
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_share: float = 0.3
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    max_model_len: int | None = None
    threads: int = 1
    cores: str = ""
    tensor_parallel_size: int = 1
    collectives: str = "auto"
    decode_graphs: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "threads"):
            _at_least(name, getattr(self, name), 1)
        if self.decode_graphs not in DECODE_GRAPHS:
            names = ", ".join(DECODE_GRAPHS)
            raise ConfigError(f"decode_graphs must be one of {names}, got {self.decode_graphs!r}")
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size must be at most {MAX_RANKS}, got {self.tensor_parallel_size}"
            )
        if self.num_blocks is not None:
            _at_least("num_blocks", self.num_blocks, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if not (math.isfinite(self.kv_memory_share) and 0.0 < self.kv_memory_share <= 0.95):
            raise ConfigError(f"kv_memory_share must be in (0, 0.95], got {self.kv_memory_share!r}")


def check_watermark(watermark: float) -> None:
    """Raise ConfigError unless it is a share of the pool that leaves something to use."""
    if not (math.isfinite(watermark) and 0.0 <= watermark < 1.0):
        raise ConfigError(f"watermark must be in [0, 1), got {watermark!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
