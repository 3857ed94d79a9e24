"""A Hugging Face tokenizer folder as the front door needs it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from cluster.core.errors import InvalidRequest, ModelError
from cluster.core.modelinfo import tokenizer_digest
from cluster.text.chat import ChatMessage, ChatTemplate
from cluster.text.detokenize import DetokenizerFactory, IncrementalDetokenizer
from cluster.text.folder import GenerationDefaults, TextConfig, read_text_config
from cluster.text.toolong import TooManyTokens


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads at once.

    >>> tokenizer = Tokenizer.from_folder("models/smollm2")
    >>> tokenizer.decode(tokenizer.encode("Hello"))
    'Hello'
    """

    def __init__(self, config: TextConfig) -> None:
        """Raises ModelError when tokenizer.json or the chat template cannot be used."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(config.tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{config.tokenizer_file}: {error}") from error
        # Settings left over from training would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        added = backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        decoder = json.loads(backend.to_str()).get("decoder")
        self._detokenizers = DetokenizerFactory(backend, decoder, frozenset(special_ids))
        self._template: ChatTemplate | None = None
        if config.chat_template is not None:
            control = [token.content for token in added.values() if token.special]
            source, origin = config.chat_template
            self._template = ChatTemplate(source, config.special_tokens, control, origin)
        self.eos_token_ids = self._all_eos_ids(config)
        """Ids that end a text, ascending."""
        self.defaults: GenerationDefaults = config.defaults
        """The model's recommended sampling."""
        self.digest = tokenizer_digest(config.tokenizer_file.read_bytes())
        """Engines tell theirs (ModelInfo.tokenizer)."""
        self.folder: Path = config.tokenizer_file.parent
        """Where all this was read from."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load from a model folder. Raises ModelError naming the file and the reason."""
        return cls(read_text_config(folder))

    @property
    def vocab_size(self) -> int:
        """Ids that have a token. A model's embedding is often padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """Ids of a raw text. Control tokens spelled out in it become control tokens.

        add_special: also what the tokenizer puts around a text, often a begin-of-text token.
        most: raise TooManyTokens for more, without making a list of them.
        """
        return _ids([_encoded(self._backend, text, add_special)], most)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation and the header of the answer as text. Raises InvalidRequest."""
        return "".join(segment.text for segment in self._chat_template().render(messages))

    def encode_chat(self, messages: Sequence[ChatMessage], most: int | None = None) -> list[int]:
        """Ids of the rendered conversation; control tokens come from the template only.

        Equal to encoding render_chat() in one piece unless a message spells out a
        control token. most: as in encode(). Raises InvalidRequest, TooManyTokens.
        """
        encoded = []
        for segment in self._chat_template().render(messages, most):
            backend = self._plain_backend() if segment.plain else self._backend
            encoded.append(_encoded(backend, segment.text, False))
        return _ids(encoded, most)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole output, special tokens left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh decoder for one output; its parts concatenate to decode()."""
        return self._detokenizers.create()

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest.single("chat", "the model has no chat template; send text instead")
        return self._template

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A twin that takes special tokens for text. Made when a message first needs it: most
        servers never see such a message, and the copy costs as much as the load."""
        with self._plain_lock:
            if self._plain is None:
                plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _all_eos_ids(self, config: TextConfig) -> tuple[int, ...]:
        ids = set(config.eos_token_ids)
        eos = config.special_tokens.get("eos_token")
        own = self._backend.token_to_id(eos) if eos else None
        if own is not None:
            ids.add(own)
        return tuple(sorted(ids))


def _encoded(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> tokenizers.Encoding:
    # The batch form leaves out character offsets, which takes half the time for a long text; it
    # releases the interpreter lock meanwhile.
    return backend.encode_batch_fast([text], add_special_tokens=add_special)[0]


def _ids(parts: Sequence[tokenizers.Encoding], most: int | None) -> list[int]:
    # Counted first: a list of millions of ids is made with the interpreter lock held.
    count = sum(map(len, parts))
    if most is not None and count > most:
        raise TooManyTokens(count)
    ids: list[int] = []
    for part in parts:
        ids += part.ids
    return ids
