"""R26: the parts of a stream are the text of the whole, and no part is half a character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.detokenize import (
    REPLACEMENT,
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
)
from cluster.text.tokenizer import Tokenizer
from tests.unit.text.conftest import FAMILIES

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = [
    "Once upon a time",
    "  leading and trailing  ",
    "안녕하세요 세계, 오늘 날씨가 참 좋네요.",
    f"emoji {FAMILY} joined, 🏳️‍🌈 flag, 👍🏽 skin tone",
    "combining e\u0301 and \u0928\u093f, rare 𒀀𓀀",
    "tabs\tand\nnew lines\r\n",
]
BYTE_FAMILIES = ["byte_level", "byte_fallback"]

# Ids beyond the vocabulary too: a model's embedding is often padded.
any_ids = st.lists(st.integers(0, 470), max_size=40)


def deltas(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=200, deadline=None)
@given(ids=any_ids)
def test_parts_concatenate_to_one_shot_decode(
    families: dict[str, Tokenizer], family: str, ids: list[int]
) -> None:
    tokenizer = families[family]
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", BYTE_FAMILIES)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_no_part_holds_half_a_character(
    families: dict[str, Tokenizer], family: str, text: str
) -> None:
    tokenizer = families[family]
    parts = deltas(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(parts) == text
    assert sum(part.count(REPLACEMENT) for part in parts) == text.count(REPLACEMENT)


@pytest.mark.parametrize("family", BYTE_FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_cut_anywhere_is_decoded_like_transformers(
    folders: dict[str, Path], families: dict[str, Tokenizer], family: str, text: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(folders[family])
    tokenizer = families[family]
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        whole = oracle.decode(ids[:cut], skip_special_tokens=True)
        assert "".join(deltas(tokenizer.detokenizer(), ids[:cut])) == whole


def test_incomplete_tail_is_held_and_flushed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀")
    *parts, rest = deltas(byte_level.detokenizer(), ids[:-1])
    assert "".join(parts) == "a"
    assert rest == REPLACEMENT


def test_bytes_that_are_no_text_do_not_stop_the_stream(byte_level: Tokenizer) -> None:
    broken = byte_level.encode("😀")[:1] * 50
    parts = deltas(byte_level.detokenizer(), [*broken, *byte_level.encode("ok")])
    assert "".join(parts) == REPLACEMENT * 50 + "ok"
    assert all(len(part) <= 3 for part in parts)


def test_a_run_of_byte_tokens_is_read_as_a_whole(families: dict[str, Tokenizer]) -> None:
    # "€" and a stray byte: the library makes four replacement characters of it, so an early "€"
    # would be wrong.
    tokenizer = families["byte_fallback"]
    first = 3
    run = [first + byte for byte in (0xE2, 0x82, 0xAC, 0xFF)]
    parts = deltas(tokenizer.detokenizer(), run)
    assert parts == ["", "", "", "", REPLACEMENT * 4]
    assert deltas(tokenizer.detokenizer(), run[:3])[-1] == "€"


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("byte_level", ByteLevelDetokenizer),
        ("byte_fallback", ByteFallbackDetokenizer),
        ("word_piece", WindowDetokenizer),
        ("metaspace", WindowDetokenizer),
    ],
)
def test_the_exact_decoders_are_used_where_they_apply(
    families: dict[str, Tokenizer], family: str, kind: type[IncrementalDetokenizer]
) -> None:
    assert isinstance(families[family].detokenizer(), kind)


def test_the_window_stays_small_whatever_came_before() -> None:
    widths: list[int] = []

    def decode(ids: list[int]) -> str:
        widths.append(len(ids))
        # A decoder that never gets to a complete character in a long stretch.
        return REPLACEMENT if all(token_id == 1 for token_id in ids) else "x" * len(ids)

    detokenizer = WindowDetokenizer(decode, lambda token_id: False)
    for token_id in [0] * 500 + [1] * 500:
        detokenizer.feed(token_id)
    assert max(widths) <= 32
    assert len(widths) <= 2000


def test_streams_of_one_tokenizer_do_not_mix(byte_level: Tokenizer) -> None:
    one, two = byte_level.detokenizer(), byte_level.detokenizer()
    smile, wave = byte_level.encode("😀"), byte_level.encode("👋")
    texts = ["", ""]
    for left, right in zip(smile, wave, strict=True):
        texts[0] += one.feed(left)
        texts[1] += two.feed(right)
    assert texts == ["😀", "👋"]
