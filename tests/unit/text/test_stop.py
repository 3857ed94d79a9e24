"""R28: a stop string is found however the text is cut, and nothing else is held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.text.stop import StopMatcher, StopStrings

words = st.text(alphabet="ab", min_size=1, max_size=5)
stops = st.lists(words, max_size=4)
texts = st.text(alphabet="abc", max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=8)


def pieces(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def first_match(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The oracle: the first end of any stop string; of two that end there the longer."""
    for end in range(len(text) + 1):
        here = [string for string in strings if text[:end].endswith(string)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_open_prefix(text: str, strings: list[str]) -> int:
    """The oracle of holding back: the longest end of `text` that begins some stop string."""
    lengths = range(min(len(text), 5), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in strings)), 0)


@given(text=texts, strings=stops, at=cuts)
def test_match_and_text_equal_the_naive_search(
    text: str, strings: list[str], at: list[int]
) -> None:
    matcher, shown, matched = StopMatcher(StopStrings(strings)), "", None
    for piece in pieces(text, at):
        part, matched = matcher.feed(piece)
        shown += part
        if matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matched) == first_match(text, strings)


@given(text=texts, strings=stops)
def test_exactly_the_open_prefix_is_held(text: str, strings: list[str]) -> None:
    matcher, shown = StopMatcher(StopStrings(strings)), ""
    for end, char in enumerate(text, start=1):
        part, matched = matcher.feed(char)
        if matched is not None:
            return
        shown += part
        assert len(shown) == end - longest_open_prefix(text[:end], strings)


@given(text=texts, strings=stops, at=cuts)
def test_skipped_text_is_all_shown(text: str, strings: list[str], at: list[int]) -> None:
    matcher = StopMatcher(StopStrings(strings))
    shown = "".join(matcher.skip(piece) for piece in pieces(text, at))
    assert shown + matcher.flush() == text


@given(head=texts, tail=texts, strings=stops)
def test_a_match_may_begin_in_skipped_text(head: str, tail: str, strings: list[str]) -> None:
    matcher = StopMatcher(StopStrings(strings))
    shown = matcher.skip(head)
    part, matched = matcher.feed(tail)
    shown += part if matched is not None else part + matcher.flush()
    whole = head + tail
    ends = range(len(head) + 1, len(whole) + 1)
    end = next((e for e in ends if any(whole[:e].endswith(s) for s in strings)), None)
    if end is None:
        assert (shown, matched) == (whole, None)
    else:
        longest = max((s for s in strings if whole[:end].endswith(s)), key=len)
        assert (shown, matched) == (whole[: end - len(longest)], longest)


@pytest.mark.parametrize(
    ("strings", "text", "shown", "matched"),
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bcd", "abcd"], "xabcd", "x", "abcd"),
        (["aab"], "aaab", "a", "aab"),
        (["안녕"], "그리고 안녕", "그리고 ", "안녕"),
        ([], "anything", "anything", None),
    ],
)
def test_examples(strings: list[str], text: str, shown: str, matched: str | None) -> None:
    assert StopMatcher(StopStrings(strings)).feed(text) == (shown, matched)
