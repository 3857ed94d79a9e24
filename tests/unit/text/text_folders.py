"""Small but real tokenizer folders, trained on the spot: no network, no downloaded vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a very small engine, and it waited for its turn.",
    "def plan(now): return [seq for seq in running if seq.computed < seq.total]",
    "안녕하세요 세계, 오늘 날씨가 참 좋네요. 감사합니다.",
    "Grüße aus Köln: naïve café, déjà vu. Привет, мир! こんにちは世界。",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_folder(folder: Path, *, vocab_size: int = 420) -> Path:
    """GPT-2 style byte-level BPE with ChatML control tokens, as SmolLM and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Added, but not special: has text, and characters outside the byte alphabet.
    tokenizer.add_tokens([AddedToken("<tool call→>", special=False, normalized=False)])
    return _save(tokenizer, folder, eos="<|im_end|>", chat_template=CHATML)


def byte_fallback_folder(folder: Path) -> Path:
    """SentencePiece style BPE as Llama 2 has it: pieces with a leading ▁, bytes for the rest."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    pieces.train_from_iterator(CORPUS[:3], trainer)
    trained = json.loads(pieces.to_str())["model"]

    control = ["<unk>", "<s>", "</s>"]
    names = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece for piece in trained["vocab"] if piece not in control]
    model = models.BPE(
        vocab={piece: token_id for token_id, piece in enumerate(names)},
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return _save(tokenizer, folder, eos="</s>", chat_template=None, bos_token="<s>")


def word_piece_folder(folder: Path) -> Path:
    """A decoder that is neither: WordPiece, whose decoder puts and removes spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(tokenizer, folder, eos="[SEP]", chat_template=None)


def metaspace_folder(folder: Path) -> Path:
    """Unigram with a Metaspace decoder (T5, ALBERT): drops the space of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(tokenizer, folder, eos="</s>", chat_template=None)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), "utf-8")


def _save(
    tokenizer: Tokenizer, folder: Path, *, eos: str, chat_template: str | None, **named: str
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **named}
    if chat_template is not None:
        config["chat_template"] = chat_template
    config["clean_up_tokenization_spaces"] = False
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "config.json", {"eos_token_id": tokenizer.token_to_id(eos)})
    return folder
