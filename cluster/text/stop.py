"""Stop strings, found while text streams.

Aho and Corasick 1975: one automaton over all stop strings, one state per stream. The depth
of the state is the length of the longest end of the text that could still become a stop string:
exactly that much is held back, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


class StopStrings:
    """The automaton of a request's stop strings; immutable, shared by nothing but that request.

    strings: each at least one character; none at all matches nothing.
    """

    __slots__ = ("depth", "fail", "match", "next")

    def __init__(self, strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """State -> character -> deeper state."""
        self.depth = [0]
        self.fail = [0]
        """State -> state of its longest proper suffix that begins a stop string."""
        self.match: list[str | None] = [None]
        """State -> longest stop string that ends here."""
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            deeper = self.next[state].get(char)
            if deeper is None:
                deeper = self.next[state][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.match.append(None)
            state = deeper
        self.match[state] = string

    def _link(self) -> None:
        """Failure links, breadth first: a link points to a shallower state, done before."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, deeper in self.next[state].items():
                self.fail[deeper] = self.step(self.fail[state], char)
                queue.append(deeper)
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time."""
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)


class Scan(NamedTuple):
    """text: what is certain to belong to the output. matched: the stop string that ended it."""

    text: str
    matched: str | None


class StopMatcher:
    """Looks for the stop strings in one stream of text.

    Of several stop strings the one that is complete first wins, of two that end at the same
    character the longer. How the text is cut into parts makes no difference.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> Scan:
        """Text up to the match, or up to what may begin one. Not to be called after a match."""
        pending = self._held + text
        strings = self._strings
        for at, char in enumerate(text, start=len(self._held) + 1):
            self._state = strings.step(self._state, char)
            matched = strings.match[self._state]
            if matched is not None:
                self._held = ""
                return Scan(pending[: at - len(matched)], matched)
        return Scan(self._release(pending), None)

    def skip(self, text: str) -> str:
        """The same for text that must not end the output yet, even if a stop string is in it.
        One that begins in it can still be completed by later text."""
        for char in text:
            self._state = self._strings.step(self._state, char)
        return self._release(self._held + text)

    def flush(self) -> str:
        """What is held, at the end of the output."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _release(self, pending: str) -> str:
        certain = len(pending) - self._strings.depth[self._state]
        self._held = pending[certain:]
        return pending[:certain]
