"""A conversation rendered with the model's own chat template.

Templates come with the weights and are code of a stranger: they run in Jinja's immutable sandbox,
with the globals and filters that templates of the Hugging Face ecosystem expect. The text equals
transformers' `apply_chat_template(messages, add_generation_prompt=True)`.

Content cannot forge control tokens. A special token spelled out in a message ("<|im_end|>")
goes through the template as an opaque mark, and the tokenizer encodes what the mark stands for
as plain text. A template that assembles control tokens from parts of the input is beyond this;
roles, which templates do use that way, are limited to harmless characters instead.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.core.errors import FieldViolation, InvalidRequest, ModelError
from cluster.text.toolong import TooManyTokens

MAX_MESSAGES = 4096
"""Messages of one conversation; templates often look back over all of them for each."""

_ROLE = re.compile(r"[a-z0-9_]{1,32}")


class ChatMessage(NamedTuple):
    """One turn: who ("system", "user", "assistant", ...) said what."""

    role: str
    content: str


class Segment(NamedTuple):
    """A part of a rendered conversation. plain: its control tokens are only text."""

    text: str
    plain: bool


class ChatTemplate:
    """A compiled template.

    source: Jinja. special_tokens: variables such as bos_token. control_tokens: strings
    that must not become tokens when they stand in a message. origin: where the source
    was found, for the error.
    Raises ModelError when the template does not parse.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: Collection[str],
        origin: Path,
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{origin}: chat template: {error}") from error
        self._variables = dict(special_tokens)
        # Longest first: where one control token begins another, the whole one is meant.
        longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def render(self, messages: Sequence[ChatMessage], most: int | None = None) -> list[Segment]:
        """The conversation and the header of the answer, in order.

        Raises InvalidRequest when the conversation is empty, has a malformed role, or is
        refused by the template; TooManyTokens when its messages spell out more than `most` control
        tokens, each of which becomes a segment.
        """
        _check(messages)
        # Marks survive what templates do to content (trim, tojson, upper); nobody can guess them.
        nonce = secrets.randbits(64)
        literals: list[str] = []

        def mark(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"\ue000{nonce}.{len(literals) - 1}\ue001"

        turns = [{"role": m.role, "content": self._control.sub(mark, m.content)} for m in messages]
        if most is not None and len(literals) > most:
            raise TooManyTokens(len(literals))
        rendered = self._render(turns)
        # The capturing group leaves the literals' numbers at the odd places.
        parts = re.split(f"\ue000{nonce}\\.(\\d+)\ue001", rendered)
        segments = [
            Segment(literals[int(part)], True) if at % 2 else Segment(part, False)
            for at, part in enumerate(parts)
        ]
        return [segment for segment in segments if segment.text]

    def _render(self, turns: list[dict[str, str]]) -> str:
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        # What a template does not expect surfaces as whatever its expressions raise; there is no
        # state to corrupt, and the conversation is what triggered it.
        except Exception as error:
            raise InvalidRequest.single(
                "chat.messages", f"refused by the model's chat template: {error}"
            ) from error


def _check(messages: Sequence[ChatMessage]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest.single(
            "chat.messages", f"must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}"
        )
    violations = [
        FieldViolation(
            f"chat.messages[{at}].role",
            f"must be 1 to 32 of a-z, 0-9 and _, got {message.role[:64]!r}",
        )
        for at, message in enumerate(messages)
        if not _ROLE.fullmatch(message.role)
    ]
    if violations:
        raise InvalidRequest(violations)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class reads it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
