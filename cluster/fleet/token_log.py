"""The token log: what a request *is*. KV blocks are only a cache of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.core.errors import HeadwayError
from cluster.core.ids import TokenId
from cluster.core.outcome import FinishReason
from cluster.core.plan import TokenLogprob
from cluster.core.sampling import SamplingParams


class SequenceGap(HeadwayError):
    """A producer skipped a token: a message was lost, so the log must be replayed."""


class TokenLog:
    """Prompt, resolved sampling parameters and the ids emitted so far; append only.

    One producer at a time: open_epoch() fences the one before, and accept() takes the next index
    of the current epoch only. So no token is lost, doubled or reordered, whoever produces it.
    """

    def __init__(
        self,
        prompt_ids: tuple[TokenId, ...],
        sampling: SamplingParams,
        emitted: Iterable[TokenId] = (),
    ) -> None:
        """emitted: by producers before this log was made, in order."""
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.emitted: list[TokenId] = list(emitted)
        self.logprobs: list[TokenLogprob | None] = [None] * len(self.emitted)
        """Of `emitted`, where they were asked for; None for what came before this log was made."""
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The current producer's number; 0 before the first."""
        return self._epoch

    def open_epoch(self) -> int:
        """Begin a (re)play; whatever an earlier producer still sends is void from now on."""
        self._epoch += 1
        return self._epoch

    def accept(
        self,
        epoch: int,
        first_index: int,
        token_ids: list[TokenId],
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
    ) -> int:
        """Take over tokens [first_index, ...) of producer `epoch`; returns how many were new.

        A stale epoch and tokens already held are passed over. Raises SequenceGap if tokens are
        missing in between. logprobs: of token_ids, or empty. prompt_logprobs: kept once.
        """
        if epoch != self._epoch or self.finish is not None:
            return 0
        held = len(self.emitted)
        if first_index > held:
            raise SequenceGap(f"token {held} is missing, the producer is at {first_index}")
        fresh = token_ids[held - first_index :]
        self.emitted.extend(fresh)
        if self.sampling.logprobs is not None:
            scored = logprobs[held - first_index :]
            self.logprobs += scored if len(scored) == len(fresh) else [None] * len(fresh)
        if prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = list(prompt_logprobs)
        if first_index + len(token_ids) == len(self.emitted):
            self.finish = finish
        return len(fresh)
