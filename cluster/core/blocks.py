"""The pool of KV blocks: who may write where."""

from __future__ import annotations

from cluster.core.errors import InvariantViolation
from cluster.core.ids import NULL_BLOCK, BlockId


class BlockPool:
    """Fixed set of blocks 1..num_blocks with reference counts. All operations are O(blocks named).

    Freed blocks are handed out again last in, first out: the warmest come back first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, NULL_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def free_blocks(self) -> list[BlockId]:
        """A copy of the free list, for checks."""
        return list(self._free)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, each with one reference. The caller has checked `free`."""
        if count > len(self._free):
            raise InvariantViolation(f"{count} blocks asked for, {len(self._free)} are free")
        free, references = self._free, self._references
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            references[block] = 1
        return taken

    def release(self, blocks: list[BlockId]) -> None:
        """Drop one reference of each block; the last one frees it."""
        references = self._references
        for block in blocks:
            if block == NULL_BLOCK or references[block] < 1:
                raise InvariantViolation(f"block {block} is released but not held")
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)
