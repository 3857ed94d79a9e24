"""From a stream's token ids to what its client may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cluster.text.detokenize import IncrementalDetokenizer
from cluster.text.stop import StopMatcher, StopStrings


class StopRules(NamedTuple):
    """What ends an output.

    token_ids: drawing one of them ends it. strings: completing one of them ends it, but not before
    `min_tokens` tokens are out.
    """

    strings: StopStrings
    token_ids: frozenset[int]
    min_tokens: int


class Piece(NamedTuple):
    """What became of some token ids.

    text: certain now, to be shown. accepted: how many of the ids belong to the output.
    matched: the stop string or the stop token's id, when the output ends with this piece.
    """

    text: str
    accepted: int
    matched: str | int | None


class OutputText:
    """Detokenizes one output and finds its end. After a piece with `matched` it is over.

    The output's ids end with the id whose arrival completed the stop string, its text before the
    stop string. A stop token is an id of the output without text.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, rules: StopRules) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.strings)
        self._count = 0

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Take the next ids, any number of them."""
        parts: list[str] = []
        for at, token_id in enumerate(token_ids):
            if token_id in self._rules.token_ids and self._count + 1 >= self._rules.min_tokens:
                rest = self.finish()
                parts.append(rest.text)
                if rest.matched is not None:
                    # Held text held a stop string: the output was over before this token.
                    return Piece("".join(parts), at, rest.matched)
                return Piece("".join(parts), at + 1, token_id)
            self._count += 1
            text = self._detokenizer.feed(token_id)
            if not text:
                continue
            shown, matched = self._scan(text)
            parts.append(shown)
            if matched is not None:
                return Piece("".join(parts), at + 1, matched)
        return Piece("".join(parts), len(token_ids), None)

    def finish(self) -> Piece:
        """The held rest, when the output ended for another reason (its length)."""
        shown, matched = self._scan(self._detokenizer.flush())
        if matched is None:
            shown += self._matcher.flush()
        return Piece(shown, 0, matched)

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._count < self._rules.min_tokens:
            return self._matcher.skip(text), None
        return self._matcher.feed(text)
