"""Placements that go where the keys and values are already, unless it is too full there.

Both stay within a load bound (consistent hashing with bounded loads; Mirrokni et al., 2018): an
engine with more than `bound` times the mean load is passed over, so that one popular prefix cannot
drown one engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from hashlib import blake2b

from cluster.core.prefix import chain_hash, root_hash
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Candidates, Placement, Stateless
from cluster.fleet.placements.least import LeastOutstanding
from cluster.fleet.snapshot import EngineSnapshot

DEFAULT_BOUND = 1.25
SLACK = 0.05
"""Share of the pool that an engine may be above the bound: nearly empty fleets have no mean to
speak of."""
_MARKS = 64
"""Places on the ring per engine of the usual size."""
_USUAL_POOL_TOKENS = 1 << 18
_MAX_STEPS = 32


class _LoadBound:
    def __init__(self, bound: float, candidates: Candidates) -> None:
        drawn = candidates.drawn
        mean = sum(e.outstanding for e in drawn) / len(drawn)
        self._most = bound * mean + SLACK
        self._fits = candidates.fits

    def allows(self, engine: EngineSnapshot) -> bool:
        return engine.outstanding <= self._most and self._fits(engine)


class PrefixAffinity:
    """The engine that was given the longest prefix of this prompt, by chunks of `chunk` tokens.

    What an engine holds is guessed from what was sent to it, newest first, up to as many chunks as
    its pool has room for; engines need not tell. A match of less than one chunk is none.
    """

    name = "prefix-affinity"

    def __init__(
        self, bound: float = DEFAULT_BOUND, chunk: int = 64, otherwise: Placement | None = None
    ) -> None:
        """otherwise: decides where nobody holds any of the prefix."""
        self._bound = bound
        self._chunk = chunk
        self._otherwise = otherwise or LeastOutstanding()
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._chain: tuple[Job | None, list[bytes]] = (None, [])

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        bound = _LoadBound(self._bound, candidates)
        for contents in reversed(self._chain_of(job)):
            holders = [
                engine
                for engine_id in sorted(self._holders.get(contents, ()))
                if (engine := candidates.fleet.get(engine_id)) is not None and bound.allows(engine)
            ]
            if holders:
                return self._otherwise.choose(candidates._replace(drawn=holders), job)
        return self._otherwise.choose(candidates, job)

    def placed(self, engine: EngineSnapshot, job: Job) -> None:
        engine_id = engine.engine_id
        held = self._held.setdefault(engine_id, OrderedDict())
        for contents in self._chain_of(job):
            held[contents] = None
            held.move_to_end(contents)
            self._holders.setdefault(contents, set()).add(engine_id)
        most = max(1, engine.capacity.pool_tokens // self._chunk)
        while len(held) > most:
            oldest, _ = held.popitem(last=False)
            self._release(oldest, engine_id)

    def joined(self, engine: EngineSnapshot) -> None:
        """It holds nothing yet."""

    def left(self, engine_id: str) -> None:
        for contents in self._held.pop(engine_id, ()):
            self._release(contents, engine_id)

    def _release(self, contents: bytes, engine_id: str) -> None:
        holders = self._holders[contents]
        holders.discard(engine_id)
        if not holders:
            del self._holders[contents]

    def _chain_of(self, job: Job) -> list[bytes]:
        # Asked for twice per placement, by choose() and placed().
        if self._chain[0] is not job:
            chain, parent = [], root_hash(job.tenant)
            for begin in range(0, len(job.prompt_ids) - self._chunk + 1, self._chunk):
                parent = chain_hash(parent, job.prompt_ids[begin : begin + self._chunk])
                chain.append(parent)
            self._chain = (job, chain)
        return self._chain[1]


class SessionAffinity(Stateless):
    """The same session to the same engine: consistent hashing (Karger et al., 1997), with more
    marks on the ring for larger engines. When an engine comes or goes, only its own sessions move.
    Routers agree without a word."""

    name = "session-affinity"

    def __init__(self, bound: float = DEFAULT_BOUND, otherwise: Placement | None = None) -> None:
        """otherwise: decides for requests without a session."""
        self._bound = bound
        self._otherwise = otherwise or LeastOutstanding()
        self._ring: list[tuple[int, str]] = []

    def joined(self, engine: EngineSnapshot) -> None:
        self.left(engine.engine_id)
        marks = max(1, round(_MARKS * engine.capacity.pool_tokens / _USUAL_POOL_TOKENS))
        for number in range(min(marks, 8 * _MARKS)):
            insort(self._ring, (_point(engine.engine_id, str(number)), engine.engine_id))

    def left(self, engine_id: str) -> None:
        self._ring = [mark for mark in self._ring if mark[1] != engine_id]

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        if job.session and self._ring:
            bound = _LoadBound(self._bound, candidates)
            at = bisect_left(self._ring, (_point(job.tenant, job.session), ""))
            for step in range(min(_MAX_STEPS, len(self._ring))):
                engine = candidates.fleet.get(self._ring[(at + step) % len(self._ring)][1])
                if engine is not None and bound.allows(engine):
                    return engine
        return self._otherwise.choose(candidates, job)


def _point(*parts: str) -> int:
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big")
