"""Token ids to text, as they come.

Every detokenizer here keeps the same promise: the concatenation of all feed() results and the final
flush() is what one-shot decoding of all ids (special tokens skipped) gives, and no part ends in
the middle of a character. Each token costs amortised constant time, whatever came before.

Two families of tokenizers cover almost all models and are decoded exactly from a table of pieces:
byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 2,
Mistral, Gemma). Any other decoder is run by the library over a sliding window of tokens.
"""

from __future__ import annotations

import abc
import codecs
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no UTF-8."""
MAX_HELD_TOKENS = 16
"""The window holds back at most this many tokens: no character takes more."""


class IncrementalDetokenizer(abc.ABC):
    """The text of one output, token by token. One output, one instance."""

    @abc.abstractmethod
    def feed(self, token_id: int) -> str:
        """Text that has become certain with this token; often empty in mid-character."""

    @abc.abstractmethod
    def flush(self) -> str:
        """What is still held, at the end of the output."""


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """Tokens are byte strings; text is their concatenation read as UTF-8."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteFallbackDetokenizer(IncrementalDetokenizer):
    """Tokens are text or single bytes.

    The decoder reads a run of byte tokens as a whole: all of it is UTF-8, or each byte becomes a
    replacement character. So a run is held until it ends; emitting its first characters early
    could not be taken back.
    """

    def __init__(self, pieces: Mapping[int, str | int | None], strip: LeadingStrip) -> None:
        """pieces: id -> text, byte value, or None for a token that is skipped."""
        self._pieces = pieces
        self._strip_char = strip.char
        self._strip_left = strip.limit
        self._run = bytearray()

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip_char):
                self._strip_left = 0
                break
            text = text[len(self._strip_char) :]
            self._strip_left -= 1
        return text


class WindowDetokenizer(IncrementalDetokenizer):
    """Decodes the last emitted tokens with and without the new ones; the difference is new.

    Keeping the last emitted tokens as context makes a decoder that treats the first token of a
    text differently (drops its space) treat the new ones as what they are: not the first.
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped: Callable[[int], bool]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        # A skipped token as the only context would make the next one the first of a text again.
        if self._skipped(token_id):
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._held)) if self._held else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return new


class LeadingStrip(NamedTuple):
    """Up to `limit` times `char` is dropped from the front of a text."""

    char: str
    limit: int


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; they share its table of pieces.

    decoder: the "decoder" object of tokenizer.json. special_ids: ids without text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: dict[str, Any] | None,
        special_ids: frozenset[int],
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        fallback = _byte_fallback(decoder)
        if _is_byte_level(decoder):
            byte_pieces = _Table(self._byte_level_piece)
            self.create: Callable[[], IncrementalDetokenizer] = lambda: ByteLevelDetokenizer(
                byte_pieces
            )
        elif fallback is not None:
            text_pieces = _Table(lambda token_id: self._fallback_piece(token_id, fallback))
            self.create = lambda: ByteFallbackDetokenizer(text_pieces, fallback.strip)
        else:
            self.create = lambda: WindowDetokenizer(self._decode, self._skipped)

    def _token(self, token_id: int) -> str | None:
        """The token's string; None when it has no text (special, or padding of the vocabulary)."""
        return None if token_id in self._special_ids else self._backend.id_to_token(token_id)

    def _skipped(self, token_id: int) -> bool:
        return self._token(token_id) is None

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def _byte_level_piece(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:
            # An added token, stored as its text.
            return token.encode("utf-8")

    def _fallback_piece(self, token_id: int, fallback: _ByteFallback) -> str | int | None:
        token = self._token(token_id)
        if token is None:
            return None
        for pattern, content in fallback.replacements:
            token = token.replace(pattern, content)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return int(token[3:5], 16)
            except ValueError:
                return token
        return token


class _Table(dict[int, Any]):
    """id -> piece, filled when an id is first seen: outputs use few of 100,000 tokens."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Any:
        piece = self[token_id] = self._make(token_id)
        return piece


class _ByteFallback(NamedTuple):
    replacements: tuple[tuple[str, str], ...]
    strip: LeadingStrip


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    steps = _steps(decoder)
    return len(steps) == 1 and steps[0].get("type") == "ByteLevel"


def _byte_fallback(decoder: dict[str, Any] | None) -> _ByteFallback | None:
    """The parameters of Replace*, ByteFallback, Fuse, Strip?; None for any other decoder."""
    steps = _steps(decoder)
    replacements: list[tuple[str, str]] = []
    while steps and steps[0].get("type") == "Replace":
        step = steps.pop(0)
        pattern = step.get("pattern", {}).get("String")
        if not pattern:
            return None
        replacements.append((pattern, step["content"]))
    kinds = [step.get("type") for step in steps]
    if kinds[:2] != ["ByteFallback", "Fuse"] or kinds[2:] not in ([], ["Strip"]):
        return None
    no_strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    strip = steps[2] if len(steps) == 3 else no_strip
    if strip["stop"]:
        return None
    return _ByteFallback(tuple(replacements), LeadingStrip(strip["content"], strip["start"]))


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in printable]
    chars.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return chars


_BYTE_OF_CHAR = _byte_alphabet()
