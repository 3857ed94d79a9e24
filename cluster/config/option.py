"""What one option is, and how a text or a TOML value becomes a checked value of it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool | Path | None

_SWITCH_WORDS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


class Kind(enum.Enum):
    """The value is how messages and the documentation call it."""

    TEXT = "a string"
    INTEGER = "an integer"
    NUMBER = "a number"
    SWITCH = "true or false"
    PATH = "a path"


TEXT, INTEGER, NUMBER, SWITCH, PATH = Kind


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a number; inf on a side without a limit, which is itself never a value."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def allow(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


def at_least(low: float) -> Limits:
    return Limits(low)


def above(low: float) -> Limits:
    return Limits(low, low_open=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that an operator may set.

    section, key: where it stands in the file. default: None where `unset` says what happens
    without a value. choices: all there is; of a path, names that are no paths. flag_name: where it
    is not the key with dashes; "" for none. unit: of a number, or what stands for the value in
    `--help`. example: a value for the sample file, for options without a default. secret: only the
    environment may hold it: files and command lines are read by others.
    """

    section: str
    key: str
    kind: Kind
    default: Value
    help: str
    limits: Limits | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    unset: str = ""
    example: Value = None
    flag_name: str | None = None
    secret: bool = False

    @property
    def name(self) -> str:
        """section.key: what everything else calls the option."""
        return f"{self.section}.{self.key}"

    @property
    def flag(self) -> str:
        """Without the dashes that begin it nothing can be typed: "" then."""
        if self.secret or self.flag_name == "":
            return ""
        return "--" + (self.flag_name or self.key.replace("_", "-"))

    @property
    def variable(self) -> str:
        return f"HEADWAY_{self.section}_{self.key}".upper()

    @property
    def expected(self) -> str:
        """What a value has to be, for people."""
        if self.choices:
            return ("a path or " if self.kind is Kind.PATH else "") + _one_of(self.choices)
        if self.limits is not None:
            return f"{self.kind.value} {self.limits}"
        return self.kind.value

    def from_text(self, text: str) -> Value:
        """Of a flag or the environment. Raises ValueError with what is wrong."""
        if self.kind is Kind.SWITCH:
            if text.lower() not in _SWITCH_WORDS:
                raise ValueError(f"must be true or false, got {text!r}")
            return _SWITCH_WORDS[text.lower()]
        if self.kind is Kind.PATH:
            return self.from_value(text)
        value: Value = text
        try:
            if self.kind is Kind.INTEGER:
                value = int(text)
            elif self.kind is Kind.NUMBER:
                value = float(text)
        except ValueError:
            raise ValueError(f"must be {self.expected}, got {text!r}") from None
        return self.from_value(value)

    def from_value(self, value: object, folder: Path | None = None) -> Value:
        """Of a file; a relative path in it starts at `folder`, the file's own.

        Raises ValueError with what is wrong.
        """
        checked = self._typed(value)
        if isinstance(checked, Path):
            return checked if folder is None else folder / checked
        if self.choices and checked not in self.choices:
            raise ValueError(f"must be {_one_of(self.choices)}, got {value!r}")
        # Switches are numbers to Python.
        number = isinstance(checked, int | float) and not isinstance(checked, bool)
        if self.limits is not None and number and not self.limits.allow(checked):  # type: ignore[arg-type]
            raise ValueError(f"must be {self.limits}, got {value!r}")
        return checked

    def _typed(self, value: object) -> Value:
        is_switch = isinstance(value, bool)
        if self.kind is Kind.SWITCH and is_switch:
            return bool(value)
        if self.kind is Kind.INTEGER and isinstance(value, int) and not is_switch:
            return value
        if self.kind is Kind.NUMBER and isinstance(value, int | float) and not is_switch:
            return float(value)
        if self.kind is Kind.TEXT and isinstance(value, str):
            return value
        if self.kind is Kind.PATH and isinstance(value, str) and value:
            return value if value in self.choices else Path(value).expanduser()
        raise ValueError(f"must be {self.expected}, got {value!r}")


def _one_of(choices: tuple[str, ...]) -> str:
    return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
