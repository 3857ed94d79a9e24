"""Which KV blocks two sequences have in common: a hash chain over whole blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from typing import NamedTuple

from cluster.core.blocks import BlockHash, BlockPool
from cluster.core.ids import BlockId, TokenId
from cluster.core.sequence import Sequence

DIGEST_BYTES = 16


def root_hash(tenant: str) -> BlockHash:
    """Where a tenant's chains begin: tenants share nothing, so none can probe another's prompts."""
    return blake2b(tenant.encode(), digest_size=DIGEST_BYTES).digest()


def chain_hash(parent: BlockHash, tokens: SequenceOf[TokenId]) -> BlockHash:
    """Names a whole block by its tokens and, through `parent`, by everything before them.

    BLAKE2b with 128 bits: nobody finds two prompts with the same chain on purpose.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


class PartialHit(NamedTuple):
    """A block whose first `tokens` positions are what a sequence wants next. It goes on being
    written by its owner, so it is copied, not shared."""

    block: BlockId
    tokens: int


class PromptEnd(NamedTuple):
    """The partly filled last block of a prompt. birth: tells whether the block was reused since."""

    block: BlockId
    birth: int
    tokens: tuple[TokenId, ...]


class NoPrefixCache:
    """Every sequence computes all of its own tokens."""

    name = "off"

    def match(self, sequence: Sequence, pool: BlockPool) -> list[BlockId]:
        return []

    def match_partial(self, sequence: Sequence, hits: int, pool: BlockPool) -> PartialHit | None:
        return None

    def is_coming(self, sequence: Sequence, hits: int, running: SequenceOf[Sequence]) -> bool:
        return False

    def publish(self, sequence: Sequence, pool: BlockPool) -> None:
        """Nothing is published."""


class PrefixCache:
    """Full blocks are shared by contents; the last known token is always computed, since its
    logits are wanted. The partly filled block at the end of a prompt is remembered too, so that
    several samples of one prompt copy it instead of computing it (copy on write)."""

    name = "on"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ends: dict[BlockHash, PromptEnd] = {}
        """By the hash of the whole blocks before it: the newest prompt that ends in mid-block."""

    def match(self, sequence: Sequence, pool: BlockPool) -> list[BlockId]:
        """The longest run of blocks from the start that somebody has computed already."""
        usable = (sequence.total - 1) // self._block_size
        self._extend_chain(sequence, usable)
        hits: list[BlockId] = []
        for contents in sequence.chain[:usable]:
            block = pool.find(contents)
            if block is None:
                break
            hits.append(block)
        return hits

    def match_partial(self, sequence: Sequence, hits: int, pool: BlockPool) -> PartialHit | None:
        """A block to copy for the positions after `hits` whole blocks."""
        parent = sequence.chain[hits - 1] if hits else root_hash(sequence.tenant)
        end = self._ends.get(parent)
        if end is None:
            return None
        if pool.birth(end.block) != end.birth:
            del self._ends[parent]
            return None
        at = hits * self._block_size
        wanted = sequence.tokens[at : min(at + self._block_size, sequence.total - 1)]
        common = 0
        for mine, theirs in zip(wanted, end.tokens, strict=False):
            if mine != theirs:
                break
            common += 1
        return PartialHit(end.block, common) if common else None

    def is_coming(self, sequence: Sequence, hits: int, running: SequenceOf[Sequence]) -> bool:
        """Whether a running sequence is just computing the first block that did not hit."""
        usable = (sequence.total - 1) // self._block_size
        if hits >= usable:
            return False
        wanted = sequence.chain[hits]
        return any(
            len(other.chain) > hits and other.chain[hits] == wanted and other.unsettled > 1
            for other in running
        )

    def publish(self, sequence: Sequence, pool: BlockPool) -> None:
        """Make blocks that have become full known to others: as far as the ids are known."""
        if sequence.settled == sequence.prompt_len:
            self._publish_end(sequence, pool)
        full = sequence.settled // self._block_size
        if full <= sequence.published:
            return
        self._extend_chain(sequence, full)
        for index in range(sequence.published, full):
            pool.publish(sequence.blocks[index], sequence.chain[index])
        sequence.published = full

    def _publish_end(self, sequence: Sequence, pool: BlockPool) -> None:
        whole, rest = divmod(sequence.prompt_len, self._block_size)
        if rest == 0:
            return
        self._extend_chain(sequence, whole)
        parent = sequence.chain[whole - 1] if whole else root_hash(sequence.tenant)
        block = sequence.blocks[whole]
        tokens = tuple(sequence.tokens[whole * self._block_size : sequence.prompt_len])
        self._ends[parent] = PromptEnd(block, pool.birth(block), tokens)
        if len(self._ends) > 2 * pool.num_blocks:
            self._ends = {h: e for h, e in self._ends.items() if pool.birth(e.block) == e.birth}

    def _extend_chain(self, sequence: Sequence, blocks: int) -> None:
        chain, size = sequence.chain, self._block_size
        while len(chain) < blocks:
            at = len(chain) * size
            parent = chain[-1] if chain else root_hash(sequence.tenant)
            chain.append(chain_hash(parent, sequence.tokens[at : at + size]))
