"""Sampling parameters, resolved at the door, and the stateless randomness behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.core.errors import FieldViolation, InvalidRequest
from cluster.core.ids import TokenId

MIN_TEMPERATURE = 0.01
"""Below this the scaled logits overflow for some models; 0 itself means greedy."""
MAX_TEMPERATURE = 10.0
MIN_TOP_P = 0.001
MIN_MIN_P = 1e-6
MAX_TOP_K = 1 << 20
MAX_SEED = (1 << 64) - 1
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Immutable and complete: nothing is left to a default later,
    because a replay on another engine must draw the same tokens.

    temperature: 0 is greedy (argmax, lowest id wins a tie), else in [0.01, 10].
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set with cumulative probability >= top_p; in [0.001, 1].
    min_p: keep tokens with probability >= min_p * p_max; 0 or in [1e-6, 1].
    seed: unsigned 64 bit; with the output index it is all the randomness there is.
    max_tokens: output tokens at most, >= 1. min_tokens: no stop token is drawn before it.
    stop_token_ids: drawing one of them ends the sequence (end-of-text ids are put here at
    the door unless the caller asked to ignore them).
    logprobs: with each output token its log-probability and those of the so many likeliest, 0 to
    20; None for none. prompt_logprobs: the same for the prompt's tokens, from the second on.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        violations = [v for v in self._violations() if v is not None]
        if violations:
            raise InvalidRequest(violations)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def _violations(self) -> list[FieldViolation | None]:
        return [
            _integer("max_tokens", self.max_tokens, 1, (1 << 31) - 2),
            _integer("min_tokens", self.min_tokens, 0, self.max_tokens),
            _number("temperature", self.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, zero=True),
            _integer("top_k", self.top_k, 0, MAX_TOP_K),
            _number("top_p", self.top_p, MIN_TOP_P, 1.0, zero=False),
            _number("min_p", self.min_p, MIN_MIN_P, 1.0, zero=True),
            _integer("seed", self.seed, 0, MAX_SEED),
            _stop_ids(self.stop_token_ids),
            _integer("logprobs", self.logprobs or 0, 0, MAX_LOGPROBS),
            _integer("prompt_logprobs", self.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        ]


def _number(
    name: str, value: float, low: float, high: float, *, zero: bool
) -> FieldViolation | None:
    if math.isfinite(value) and ((zero and value == 0) or low <= value <= high):
        return None
    allowed = f"{'0 or ' if zero else ''}between {low:g} and {high:g}"
    return FieldViolation(f"sampling.{name}", f"must be {allowed}, got {value!r}")


def _integer(name: str, value: int, low: int, high: int) -> FieldViolation | None:
    if low <= value <= high:
        return None
    return FieldViolation(f"sampling.{name}", f"must be between {low} and {high}, got {value}")


def _stop_ids(ids: tuple[TokenId, ...]) -> FieldViolation | None:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        return FieldViolation(
            "sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}"
        )
    bad = [i for i in ids if i < 0]
    if bad:
        return FieldViolation("sampling.stop_token_ids", f"must be >= 0, got {bad[0]}")
    return None


def counter_key(seed: int, index: int) -> int:
    """64 random bits for output token `index` of a request with `seed`.

    A pure function, so that a replay draws what the first run drew. SplitMix64 (Steele, Lea,
    Flood 2014) twice: once to spread the seed, once over seed and index together, so that
    neighbouring seeds do not share a shifted stream.
    """
    state = _splitmix64(seed & _MASK64)
    return _splitmix64((state + index * 0x9E3779B97F4A7C15) & _MASK64)


def counter_uniform(seed: int, index: int) -> float:
    """A uniform draw in [0, 1) from the upper 53 bits of counter_key."""
    return (counter_key(seed, index) >> 11) * (1.0 / (1 << 53))


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
