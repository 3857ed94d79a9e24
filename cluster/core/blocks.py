"""The pool of KV blocks: who may write where, and what unreferenced blocks still remember."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from cluster.core.errors import InvariantViolation
from cluster.core.ids import NULL_BLOCK, BlockId

BlockHash: TypeAlias = bytes
"""Names a block's contents: its tokens and everything before them (see core.prefix)."""


class BlockPool:
    """Fixed set of blocks 1..num_blocks with reference counts. Operations are O(blocks named).

    A block is held (references > 0), cached (no reference, but published contents, in least
    recently used order) or unused. Cached blocks are taken only when no unused one is left, the
    least recently used first. Unused ones come back last in, first out: the warmest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._births = [0] * (num_blocks + 1)
        self._unused = list(range(num_blocks, NULL_BLOCK, -1))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}

    @property
    def free(self) -> int:
        """Blocks that allocate() could hand out: unused and cached."""
        return len(self._unused) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.num_blocks - self.free

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def reference_counts(self) -> list[int]:
        """By block id, a copy, for checks."""
        return list(self._references)

    def birth(self, block: BlockId) -> int:
        """Changes whenever the block is handed out anew, and its old contents with it."""
        return self._births[block]

    def free_blocks(self) -> list[BlockId]:
        """Unused and cached blocks, a copy, for checks."""
        return [*self._unused, *self._cached]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, each with one reference. The caller has checked `free`."""
        unused, references = self._unused, self._references
        if count > len(unused):
            if count > self.free:
                raise InvariantViolation(f"{count} blocks asked for, {self.free} are free")
            self._evict(count - len(unused))
        taken = [unused.pop() for _ in range(count)]
        births = self._births
        for block in taken:
            references[block] = 1
            births[block] += 1
        return taken

    def retain(self, blocks: SequenceOf[BlockId]) -> None:
        """One more reference to blocks that are held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise InvariantViolation(f"block {block} is retained but holds nothing")
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: SequenceOf[BlockId]) -> None:
        """Drop one reference of each block; the last one frees it.

        Given in the order of a sequence; freed from its end, so that the head of a chain, which
        more prefixes share, outlives its tail in the cache.
        """
        references = self._references
        for block in reversed(blocks):
            if block == NULL_BLOCK or references[block] < 1:
                raise InvariantViolation(f"block {block} is released but not held")
            references[block] -= 1
            if references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._unused.append(block)

    # -- contents ------------------------------------------------------------------------------

    def publish(self, block: BlockId, contents: BlockHash) -> None:
        """A held block is full: others may share it. The first block of a content is its home."""
        if contents not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = contents
            self._block_of[contents] = block

    def find(self, contents: BlockHash) -> BlockId | None:
        """The block with these contents, held or cached."""
        return self._block_of.get(contents)

    def is_cached(self, block: BlockId) -> bool:
        return block in self._cached

    def published(self) -> dict[BlockId, BlockHash]:
        """A copy, for checks."""
        return dict(self._hash_of)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            self._unused.append(block)
