"""The KV memory of one engine, seen from its sequences: blocks, shared prefixes, host memory."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from cluster.core.blocks import BlockPool
from cluster.core.config import blocks_for
from cluster.core.errors import InvariantViolation
from cluster.core.ids import BlockId
from cluster.core.plan import BlockCopy, StepPlan
from cluster.core.preemption import Preemption, Recompute
from cluster.core.prefix import NoPrefixCache, PartialHit
from cluster.core.sequence import Sequence


class PrefixPolicy(Protocol):
    name: str

    def match(self, sequence: Sequence, pool: BlockPool) -> list[BlockId]: ...

    def match_partial(
        self, sequence: Sequence, hits: int, pool: BlockPool
    ) -> PartialHit | None: ...

    def is_coming(self, sequence: Sequence, hits: int, running: SequenceOf[Sequence]) -> bool: ...

    def publish(self, sequence: Sequence, pool: BlockPool) -> None: ...


class KvSpace:
    """Gives blocks to sequences and takes them back. The only one to touch the pool.

    Blocks given back while steps are in flight stay out of the pool until the newest of these is
    settled: they still write to them. For an executor that keeps its promise this is more than is
    needed: steps take effect in the order of their plans, so whoever is given such a block in a
    later plan writes to it after they did. But a write that comes late, of a sequence that is gone,
    must not depend on anybody's order to do no harm, and blocks come back one step later at most.
    It never is a write to what others share either: a step whose result is passed over writes at
    or after its sequence's `settled`, and only whole blocks before that, and positions of the
    prompt before that, are published.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix: PrefixPolicy | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix = prefix or NoPrefixCache()
        self.preemption = preemption or Recompute()
        self._host_free = list(range(self.preemption.host_blocks - 1, -1, -1))
        self._launched = 0
        self._settled = 0
        self._pending: list[tuple[int, list[BlockId]]] = []
        """(step, blocks that come back when it is settled), oldest first."""
        self._copies: list[BlockCopy] = []
        self._swap_out: list[BlockCopy] = []
        self._swap_in: list[BlockCopy] = []

    @property
    def free(self) -> int:
        """Blocks that can be given out now."""
        return self.pool.free

    @property
    def pending(self) -> list[BlockId]:
        """Blocks that become free when the steps in flight are committed."""
        return [block for _, blocks in self._pending for block in blocks]

    @property
    def host_used(self) -> int:
        return self.preemption.host_blocks - len(self._host_free)

    # -- coming in -----------------------------------------------------------------------------

    def hits(self, sequence: Sequence) -> tuple[list[BlockId], PartialHit | None]:
        """Blocks that the sequence could share, and one to copy, instead of computing them."""
        if not self._may_share(sequence):
            return [], None
        hits = self.prefix.match(sequence, self.pool)
        return hits, self.prefix.match_partial(sequence, len(hits), self.pool)

    def is_coming(self, sequence: Sequence, hits: int, running: SequenceOf[Sequence]) -> bool:
        """Whether a running sequence is just computing the block after those `hits`."""
        return self._may_share(sequence) and self.prefix.is_coming(sequence, hits, running)

    def _may_share(self, sequence: Sequence) -> bool:
        """Not while it has KV of its own in host memory, nor while its whole prompt is wanted."""
        return not sequence.host_blocks and not sequence.wants_prompt_scored

    def computed_by(self, hits: list[BlockId], partial: PartialHit | None) -> int:
        """Positions that these hold."""
        return len(hits) * self.block_size + (partial.tokens if partial is not None else 0)

    def cost_of(self, hits: list[BlockId]) -> int:
        """Blocks of `free` that sharing these takes: those that are only cached so far."""
        return sum(1 for block in hits if self.pool.is_cached(block))

    def share(self, sequence: Sequence, hits: list[BlockId]) -> None:
        """Begin a sequence with blocks that others have computed."""
        self.pool.retain(hits)
        sequence.grant(hits, self.block_size)
        sequence.hold(len(hits) * self.block_size)
        sequence.published = len(hits)

    def grow(self, sequence: Sequence, blocks: int) -> list[BlockId]:
        """`blocks` more blocks for a sequence; returns them."""
        taken = self.pool.allocate(blocks)
        sequence.grant(taken, self.block_size)
        return taken

    def grow_to(self, sequence: Sequence, end: int) -> list[BlockId]:
        """Blocks so that positions [0, end) are held; returns the new ones."""
        if end <= sequence.capacity:
            return []
        return self.grow(sequence, -(-(end - sequence.capacity) // self.block_size))

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a swapped sequence's KV back into blocks that it has just been given."""
        for host, block in zip(sequence.host_blocks, sequence.blocks, strict=False):
            self._swap_in.append(BlockCopy(host, block))
        # Free at once: moves out of host memory are done before any later step moves something in.
        self._host_free.extend(sequence.host_blocks)
        sequence.host_blocks = []

    def copy(self, sequence: Sequence, partial: PartialHit) -> None:
        """The block after the shared ones starts as a copy of another sequence's."""
        target = sequence.blocks[sequence.computed // self.block_size]
        self._copies.append(BlockCopy(partial.block, target))
        sequence.hold(sequence.computed + partial.tokens)

    # -- leaving -------------------------------------------------------------------------------

    def drop(self, sequence: Sequence) -> None:
        """Take everything the sequence holds, in the pool and in host memory."""
        self._give_back(sequence.surrender())
        sequence.hold(0)
        self._host_free.extend(sequence.host_blocks)
        sequence.host_blocks = []

    def evict(self, victim: Sequence) -> bool:
        """Free a victim's blocks; True if its KV went to host memory instead of being lost. Only
        while no step is in flight, so that what it frees is there for who needs it."""
        if self._launched > self._settled:
            raise InvariantViolation("a victim is evicted while a step is in flight")
        used = blocks_for(victim.computed, self.block_size)
        if not 0 < used <= len(self._host_free) or not self.preemption.swaps(victim):
            self.drop(victim)
            return False
        victim.host_blocks = [self._host_free.pop() for _ in range(used)]
        for block, host in zip(victim.blocks, victim.host_blocks, strict=False):
            self._swap_out.append(BlockCopy(block, host))
        self._give_back(victim.surrender())
        return True

    def _give_back(self, blocks: list[BlockId]) -> None:
        if self._launched > self._settled:
            self._pending.append((self._launched, blocks))
        else:
            self.pool.release(blocks)

    # -- steps ---------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Put the moves of this step into its plan; from here on it is in flight."""
        plan.swap_out, self._swap_out = self._swap_out, []
        plan.swap_in, self._swap_in = self._swap_in, []
        plan.copies, self._copies = self._copies, []
        self._launched = plan.step

    def settle(self, step: int) -> None:
        """The oldest step in flight is done: what only it still used is free now."""
        self._settled = step
        due = [block for until, blocks in self._pending if until <= step for block in blocks]
        if due:
            self.pool.release(due)
            self._pending = [(until, blocks) for until, blocks in self._pending if until > step]
