"""A SentencePiece BPE vocabulary with scores as a tokenizer.json.

SentencePiece merges whatever pair makes the piece with the best score; the tokenizers library goes
by a list of merges. The list that does the same: all ways to make each piece out of two others,
pieces in the order of their scores (as in Hugging Face's own converter).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from workers.gguf_convert.metadata import CONTROL_TOKEN, USER_DEFINED_TOKEN

_SPACE = "▁"
_UNKNOWN_TOKEN = 2
_TAB_BYTE = "<0x09>"


def build(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], bos: int
) -> Tokenizer:
    """tokens, scores, types: by token id. bos: id of the token that begins every text."""
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[list(types).index(_UNKNOWN_TOKEN)] if _UNKNOWN_TOKEN in types else "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges(tokens, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    of_type: dict[int, list[str]] = {CONTROL_TOKEN: [], _UNKNOWN_TOKEN: [], USER_DEFINED_TOKEN: []}
    for token, kind in zip(tokens, types, strict=True):
        if kind in of_type:
            of_type[kind].append(token)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in (*of_type[CONTROL_TOKEN], *of_type[_UNKNOWN_TOKEN])
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=True) for t in of_type[USER_DEFINED_TOKEN]]
    )
    begin = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, bos)],
    )
    return tokenizer


def merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Best first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if _TAB_BYTE in vocab:
        # No piece of its own, but part of longer ones.
        vocab["\t"] = vocab[_TAB_BYTE]
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]
