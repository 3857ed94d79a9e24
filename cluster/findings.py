"""What a check has found, and how it is told to people and machines."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """subject: what was looked at, in a word or two. advice: what to do; empty when nothing is."""

    level: Level
    subject: str
    message: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return {
            "level": self.level.value,
            "subject": self.subject,
            "message": self.message,
            "advice": self.advice,
        }

    def line(self, width: int = 0) -> str:
        """width: of the subjects' column."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.level.value:<7}  {self.subject:<{width}}  {self.message}{advice}"


def ok(subject: str, message: str) -> Finding:
    return Finding(Level.OK, subject, message)


def warning(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Level.WARNING, subject, message, advice)


def problem(subject: str, message: str, advice: str = "") -> Finding:
    return Finding(Level.PROBLEM, subject, message, advice)


def lines(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    width = max((len(finding.subject) for finding in found), default=0)
    return [finding.line(width) for finding in found]


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def mebibytes(size: int) -> str:
    """For people: 1.5 GiB, 12 MiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
