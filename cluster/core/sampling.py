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
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
"""Of presence and frequency, either sign (the range of OpenAI's API)."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_IDS = 1024
MAX_ALLOWED_IDS = 1 << 16
MAX_CHOICES = 16
"""Outputs of one request at most; each is a sequence of its own."""

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
    repetition_penalty: logits of tokens that the prompt or the output holds are divided by it where
    positive, multiplied where negative (Keskar et al., 2019); in [0.01, 10], 1 for none.
    presence_penalty, frequency_penalty: taken off the logits of tokens that the output holds, once
    and per occurrence; in [-2, 2], 0 for none.
    logit_bias: (token id, what to add to its logit, in [-100, 100]); before the penalties.
    allowed_token_ids: nothing else is drawn; empty allows all.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        violations = [v for v in self._violations() if v is not None]
        if violations:
            raise InvalidRequest(violations)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether the next token depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or (self.frequency_penalty != 0.0)
        )

    @property
    def names_ids(self) -> bool:
        """Whether there are ids whose logits are changed, whatever came before."""
        bans = self.allowed_token_ids or (self.min_tokens and self.stop_token_ids)
        return bool(bans or self.logit_bias)

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
            _number(
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
                zero=False,
            ),
            _number(
                "presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY, zero=False
            ),
            _number(
                "frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY, zero=False
            ),
            _bias(self.logit_bias),
            _allowed(self.allowed_token_ids, self.stop_token_ids, self.min_tokens),
        ]


def choices_violation(n: int) -> FieldViolation | None:
    """What is wrong with the number of outputs of one request."""
    return _integer("n", n, 1, MAX_CHOICES)


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
    return _ids("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)


def _ids(name: str, ids: tuple[TokenId, ...], most: int) -> FieldViolation | None:
    if len(ids) > most:
        return FieldViolation(f"sampling.{name}", f"at most {most} ids, got {len(ids)}")
    bad = [i for i in ids if i < 0]
    if bad:
        return FieldViolation(f"sampling.{name}", f"must be >= 0, got {bad[0]}")
    return None


def _bias(biases: tuple[tuple[TokenId, float], ...]) -> FieldViolation | None:
    ids = tuple(token_id for token_id, _ in biases)
    if (wrong := _ids("logit_bias", ids, MAX_BIASED_IDS)) is not None:
        return wrong
    if len(set(ids)) != len(ids):
        return FieldViolation("sampling.logit_bias", "has an id twice")
    for token_id, bias in biases:
        if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
            return FieldViolation(
                f"sampling.logit_bias[{token_id}]",
                f"must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, got {bias!r}",
            )
    return None


def _allowed(
    allowed: tuple[TokenId, ...], stops: tuple[TokenId, ...], min_tokens: int
) -> FieldViolation | None:
    if (wrong := _ids("allowed_token_ids", allowed, MAX_ALLOWED_IDS)) is not None:
        return wrong
    if allowed and min_tokens and set(allowed) <= set(stops):
        return FieldViolation(
            "sampling.allowed_token_ids",
            f"holds nothing but stop tokens, of which none is drawn before {min_tokens} tokens",
        )
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


def choice_seed(seed: int, choice: int) -> int:
    """The seed of output `choice` of a request with `seed` and several outputs.

    A pure function, so that every output can be had alone; choice 0 has the request's own seed.
    Applied twice it gives the request's seed back, so any output's log tells that too.
    counter_key spreads a seed before anything is drawn from it: choices of neighbouring seeds share
    no draws.
    """
    return (seed ^ _splitmix64(choice)) & _MASK64 if choice else seed


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
