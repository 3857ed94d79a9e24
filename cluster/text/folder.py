"""What a Hugging Face folder says about text, read once and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cluster.core.errors import ModelError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Named tokens that a chat template may refer to as variables."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json recommends for requests that leave a field out.

    Neutral where the file is silent. Its do_sample is not looked at: it says how a library's
    generate() behaves by default, and many sampling models are saved with it false.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ChatTemplateSource(NamedTuple):
    """A chat template in Jinja, and the file that it stands in."""

    text: str
    origin: Path


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text side of a model folder.

    tokenizer_file: path of tokenizer.json. special_tokens: name ("bos_token") -> string.
    eos_token_ids: from generation_config.json, else config.json; the tokenizer's own is added
    once it is loaded. chat_template: None when the model has none.
    """

    tokenizer_file: Path
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplateSource | None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def read_text_config(folder: str | Path) -> TextConfig:
    """Read everything but the tokenizer itself.

    Raises ModelError naming file and key when something is missing or has the wrong shape.
    """
    root = Path(folder)
    tokenizer_file = root / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelError(f"{tokenizer_file}: missing; only tokenizer.json is supported")
    tokenizer_config = _read_json(root / "tokenizer_config.json")
    generation = _read_json(root / "generation_config.json")
    eos = generation.get("eos_token_id")
    eos_file = root / "generation_config.json"
    if eos is None:
        eos_file = root / "config.json"
        eos = _read_json(eos_file).get("eos_token_id")
    return TextConfig(
        tokenizer_file=tokenizer_file,
        special_tokens=_special_tokens(root, tokenizer_config),
        eos_token_ids=_id_list(eos_file, eos),
        chat_template=_chat_template(root, tokenizer_config),
        defaults=_defaults(root / "generation_config.json", generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def _special_tokens(root: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    older = _read_json(root / "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = tokenizer_config.get(name, older.get(name))
        if isinstance(value, dict):
            # An added token written out: {"content": "</s>", "lstrip": false, ...}.
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ModelError(f"{root / 'tokenizer_config.json'}: {name} must be a string")
        found[name] = value
    return found


def _id_list(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ModelError(f"{path}: eos_token_id must be ids >= 0, got {item!r}")
    return tuple(dict.fromkeys(ids))


def _chat_template(root: Path, tokenizer_config: dict[str, Any]) -> ChatTemplateSource | None:
    """The default template: its own file wins, as in transformers."""
    path = root / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplateSource(path.read_text("utf-8"), path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    path = root / "tokenizer_config.json"
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
        if template is None:
            raise ModelError(
                f"{path}: chat_template has no entry named "
                f"'default', only {sorted(str(name) for name in named)}"
            )
    if template is None:
        return None
    if not isinstance(template, str):
        raise ModelError(f"{path}: chat_template must be a string")
    return ChatTemplateSource(template, path)


def _defaults(path: Path, generation: dict[str, Any]) -> GenerationDefaults:
    found: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float)):
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != kind(value):
            raise ModelError(f"{path}: {name} must be a number, got {value!r}")
        found[name] = kind(value)
    return GenerationDefaults(**found)
