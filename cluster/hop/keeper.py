"""The second copy of a resumable stream's log, kept where its tokens come from.

The router holds the log; should it die, the engine that worked on the stream still knows all of it.
Another router, asked by the client, takes it from here and goes on.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.ids import TokenId
from cluster.core.outcome import FinishReason
from cluster.engine.core import ConnectionId, Scores, StreamKey
from cluster.hop.messages import Keep, KeptLog, Submit

MAX_LOGS = 4096
"""Oldest go first beyond this, or beyond MAX_NUMBERS."""
MAX_NUMBERS = 1 << 24
"""Ids and log-probabilities in all logs together, at most; some forty bytes each."""


@dataclass(slots=True)
class _Entry:
    submit: Submit
    keep: Keep
    emitted: list[TokenId]
    key: StreamKey | None
    """Where it is being produced; None once nobody produces it any more."""
    scores: Scores
    numbers: int
    """Ids and log-probabilities in it."""
    finish: FinishReason | None = None
    expires_s: float = 0.0


class LogKeeper:
    """Logs by resume token. Belongs to one asyncio loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._by_key: dict[StreamKey, str] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: StreamKey, message: Submit) -> None:
        """A stream has come in; kept if it asks to be."""
        keep = message.keep
        if keep is None:
            return
        self.forget(keep.token)
        emitted = list(message.emitted_ids)
        numbers = _numbers_of(message)
        self._entries[keep.token] = _Entry(message, keep, emitted, key, Scores([], []), numbers)
        self._by_key[key] = keep.token
        self._numbers += numbers
        self._make_room()

    def extend(
        self,
        key: StreamKey,
        token_ids: list[TokenId],
        finish: FinishReason | None,
        scores: Scores | None,
    ) -> None:
        """Tokens of a stream, kept or not, in order."""
        token = self._by_key.get(key)
        if token is None:
            return
        entry = self._entries[token]
        entry.emitted += token_ids
        more = len(token_ids)
        if scores is not None:
            entry.scores.output.extend(scores.output)
            entry.scores.prompt.extend(scores.prompt)
            more += sum(2 + 2 * len(score.top) for part in scores for score in part)
        entry.numbers += more
        self._numbers += more
        if finish is not None:
            entry.finish = finish
            self._orphan(entry)
        self._make_room()

    def drop(self, key: StreamKey) -> None:
        """The router has taken the stream back, or it has failed: its log is elsewhere or over."""
        token = self._by_key.get(key)
        if token is not None:
            self.forget(token)

    def lose(self, connection: ConnectionId) -> None:
        """A router is gone: its streams are kept for their window."""
        for key in [k for k in self._by_key if k.connection == connection]:
            self._orphan(self._entries[self._by_key[key]])

    def forget(self, token: str) -> None:
        """Nobody will ask for it. Idempotent."""
        entry = self._entries.pop(token, None)
        if entry is None:
            return
        self._numbers -= entry.numbers
        if entry.key is not None:
            self._by_key.pop(entry.key, None)

    def adopt(self, token: str) -> tuple[KeptLog, StreamKey | None] | None:
        """The log, for the router that goes on with it, and who produced it until now. It is not
        kept here any longer; the router's own Submit brings it back."""
        self.expire()
        entry = self._entries.get(token)
        if entry is None:
            return None
        self.forget(token)
        submit = entry.submit
        log = KeptLog(
            entry.keep,
            submit.prompt_ids,
            entry.emitted,
            submit.sampling,
            submit.tenant,
            submit.priority,
            entry.finish,
            entry.scores,
        )
        return log, entry.key

    def expire(self) -> None:
        """Let go of what nobody has asked for in time."""
        now = self._clock()
        late = [t for t, e in self._entries.items() if e.key is None and e.expires_s <= now]
        for token in late:
            self.forget(token)

    def _make_room(self) -> None:
        # The newest stays: it is bounded by the context.
        while len(self._entries) > (1 if self._numbers > MAX_NUMBERS else MAX_LOGS):
            self.forget(next(iter(self._entries)))

    def _orphan(self, entry: _Entry) -> None:
        if entry.key is not None:
            self._by_key.pop(entry.key, None)
            entry.key = None
        entry.expires_s = self._clock() + entry.keep.window_s


def _numbers_of(submit: Submit) -> int:
    sampling = submit.sampling
    named = len(sampling.allowed_token_ids) + 2 * len(sampling.logit_bias)
    # The emitted ids twice: as they came, and as they go on.
    return len(submit.prompt_ids) + 2 * len(submit.emitted_ids) + named
