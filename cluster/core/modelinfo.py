"""What the scheduler's side of the house knows about a loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts that an executor reports after loading; all the router and the scheduler ever see.

    fingerprint: hash over config and weights index; engines of one fleet must agree on it.
    max_model_len: the model's (or the operator's smaller) limit on prompt + output.
    num_blocks, block_size: the KV cache as allocated, the null block not counted.
    kv_bytes_per_token: over all layers, K and V. weight_bytes: as held in memory.
    """

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    weight_bytes: int
