"""What the scheduler's side of the house knows about a loaded model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


def tokenizer_digest(tokenizer_json: bytes) -> str:
    """Engines whose tokenizer.json is the same mean the same by a token id."""
    return hashlib.sha256(tokenizer_json).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts that an executor reports after loading; all the router and the scheduler ever see.

    fingerprint: hash over config and weights; engines of one fleet differ in it while new weights
    are rolled out. tokenizer: see tokenizer_digest(); "" where there is none. Streams can go from
    one engine to another only where it is the same.
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
    tokenizer: str = ""

    @property
    def pool_tokens(self) -> int:
        """KV positions of one engine."""
        return self.num_blocks * self.block_size

    @property
    def weights(self) -> str:
        """Engines that agree in this give a stream the same tokens (bfloat16: nearly)."""
        return f"{self.fingerprint}/{self.dtype}"
