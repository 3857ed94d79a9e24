"""Names for the integers that travel through the system.

Plain aliases and not NewTypes: they cross the msgpack hop and the worker boundary
millions of times a minute, and a cast at each would only be noise.
"""

from __future__ import annotations

from typing import TypeAlias

TokenId: TypeAlias = int
"""Index into the model's vocabulary, >= 0."""

BlockId: TypeAlias = int
"""Index of a physical KV block. Block 0 is the null block: padding is written there
and nobody ever reads it. Usable blocks are 1..num_blocks."""

SequenceId: TypeAlias = int
"""An engine's own number of a sequence, unique for the life of that engine."""

NULL_BLOCK: BlockId = 0
