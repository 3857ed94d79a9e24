"""A complete tiny model folder: random weights, and a byte-level BPE trained on a few lines."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.determinism.tiny_models import TinyLlama, write_model

CORPUS = [
    "the headway between two buses is what a passenger feels",
    "a request is its token log and blocks are only a cache of it",
    "preemption, drain and reconnect are one operation: replay",
    "0123456789 +-*/ éàü 한국어 😀",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_folder(folder: Path, seed: int = 0, max_len: int = 512) -> Path:
    """Weights in fp32, vocabulary 320, context max_len; ready for `--model`."""
    write_model(folder, TinyLlama(vocab=320, max_len=max_len, tied=True, seed=seed))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


if __name__ == "__main__":
    import sys

    print(write_tiny_folder(Path(sys.argv[1])))
