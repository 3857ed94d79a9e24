"""Ids to text, stop strings and stop tokens together: R23, R25, R28."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.pipeline import OutputText, StopRules
from cluster.text.stop import StopStrings
from cluster.text.tokenizer import Tokenizer

Result = tuple[str, int, str | int | None]


def output(
    tokenizer: Tokenizer, stop: Iterable[str] = (), ids: Iterable[int] = (), min_tokens: int = 0
) -> OutputText:
    rules = StopRules(StopStrings(stop), frozenset(ids), min_tokens)
    return OutputText(tokenizer.detokenizer(), rules)


def run(text: OutputText, batches: Sequence[Sequence[int]]) -> Result:
    """Text, number of ids and what matched, of a whole stream."""
    shown, count = "", 0
    for batch in batches:
        piece = text.feed(batch)
        shown, count = shown + piece.text, count + piece.accepted
        if piece.matched is not None:
            return shown, count, piece.matched
    rest = text.finish()
    return shown + rest.text, count, rest.matched


def batches_of(ids: Sequence[int], at: list[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in at), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab 안😀", max_size=30),
    stop=st.lists(st.text(alphabet="ab 안😀", min_size=1, max_size=3), max_size=3),
    at=st.lists(st.integers(0, 60), max_size=6),
    min_tokens=st.integers(0, 12),
)
def test_batching_changes_nothing(
    byte_level: Tokenizer, text: str, stop: list[str], at: list[int], min_tokens: int
) -> None:
    ids = byte_level.encode(text)
    one_by_one = run(output(byte_level, stop, (), min_tokens), [[i] for i in ids])
    assert run(output(byte_level, stop, (), min_tokens), batches_of(ids, at)) == one_by_one


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab 안😀", max_size=30),
    stop=st.lists(st.text(alphabet="ab 안😀", min_size=1, max_size=3), max_size=3),
)
def test_ids_end_with_the_one_that_completed_the_match(
    byte_level: Tokenizer, text: str, stop: list[str]
) -> None:
    ids = byte_level.encode(text)
    shown, count, matched = run(output(byte_level, stop), [ids])
    if matched is None:
        assert (shown, count) == (text, len(ids))
        return
    assert isinstance(matched, str)
    assert byte_level.decode(ids[:count]).startswith(shown + matched)
    before = byte_level.decode(ids[: count - 1])
    assert not any(string in before for string in stop)


def test_a_stop_string_over_three_tokens_is_never_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("I say STOP now")
    stop = "STOP"
    pieces = [byte_level.encode(char) for char in stop]
    assert all(len(piece) == 1 for piece in pieces)
    text = output(byte_level, [stop])
    shown = []
    for token_id in ids:
        piece = text.feed([token_id])
        shown.append(piece.text)
        if piece.matched is not None:
            break
    assert "".join(shown) == "I say "
    assert piece.matched == stop
    # Held while it could become the stop string, and not a character more.
    assert "S" not in "".join(shown)


def test_what_only_looked_like_a_stop_string_is_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("STO")
    assert run(output(byte_level, ["STOP"]), [ids]) == ("STO", len(ids), None)


def test_a_stop_token_counts_and_has_no_text(byte_level: Tokenizer) -> None:
    comma = byte_level.encode(",")[0]
    ids = [*byte_level.encode("one"), comma, *byte_level.encode("two")]
    shown, count, matched = run(output(byte_level, (), [comma]), [ids])
    assert (shown, count, matched) == ("one", ids.index(comma) + 1, comma)


def test_no_stop_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ababab")
    for least in range(1, len(ids) + 1):
        _, count, matched = run(output(byte_level, ["a"], (), least), [ids])
        assert count >= least or matched is None
    assert run(output(byte_level, ["a"], (), 99), [ids]) == ("ababab", len(ids), None)


def test_a_stop_string_complete_in_held_text_wins_over_the_stop_token(
    families: dict[str, Tokenizer],
) -> None:
    tokenizer = families["byte_fallback"]
    (eos,) = tokenizer.eos_token_ids
    euro = [3 + byte for byte in "€".encode()]
    shown, count, matched = run(output(tokenizer, ["€"], [eos]), [[*euro, eos]])
    assert (shown, count, matched) == ("", 3, "€")


def test_a_stop_string_complete_only_at_the_end_is_found(families: dict[str, Tokenizer]) -> None:
    euro = [3 + byte for byte in "€".encode()]
    assert run(output(families["byte_fallback"], ["€"]), [euro]) == ("", 3, "€")
