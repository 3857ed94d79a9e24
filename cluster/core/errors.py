"""What can go wrong, by who has to act: the caller, the operator, or us."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.outcome import Refusal


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request.

    field: path as the caller wrote it, for example ``sampling.temperature``.
    description: what is wrong, with the limit and the value.
    """

    field: str
    description: str


class InvalidRequest(HeadwayError):
    """The caller must change the request. Maps to INVALID_ARGUMENT with BadRequest details."""

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))

    @classmethod
    def single(cls, field: str, description: str) -> InvalidRequest:
        return cls([FieldViolation(field, description)])


class ConfigError(HeadwayError):
    """The operator must change the configuration; the message names option, limit and value."""


class ModelError(HeadwayError):
    """A model folder cannot be served; the message names the file, the key and the reason."""


class EngineLost(HeadwayError):
    """The engine that served a stream is gone; the stream's log is replayed elsewhere."""


class Overloaded(HeadwayError):
    """No room to take the request now. Maps to RESOURCE_EXHAUSTED with RetryInfo."""

    def __init__(self, message: str, retry_after_s: float, reason: Refusal = Refusal.OTHER) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Unavailable(HeadwayError):
    """Nobody can serve the request now (no engine, shutting down). Maps to UNAVAILABLE."""

    def __init__(self, message: str, reason: Refusal = Refusal.OTHER) -> None:
        super().__init__(message)
        self.reason = reason


class SequenceFailed(HeadwayError):
    """The model could not produce a token for this one sequence. Maps to INTERNAL."""


class SlowReader(HeadwayError):
    """The client stopped reading its stream for too long. Maps to ABORTED."""


class ResumedElsewhere(HeadwayError):
    """Somebody else reads the stream from now on. Maps to ABORTED."""


class UnknownResumeToken(HeadwayError):
    """No stream of that name is kept, or not any more. Maps to NOT_FOUND."""


class WireError(HeadwayError):
    """A peer on the engine hop sent something that is not the protocol."""


class IllegalTransition(HeadwayError):
    """A bug: a sequence was asked to do what its state does not allow."""


class InvariantViolation(HeadwayError):
    """A bug: the scheduler's books do not add up."""
