"""How many tokens a step may compute."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from cluster.core.plan import StepPlan
from cluster.core.sequence import Sequence


class Budget(Protocol):
    name: str

    def tokens(self, running: SequenceOf[Sequence], waiting_tokens: int) -> int:
        """The next step's budget, at least 1. waiting_tokens: of all that wait to come in."""

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step has been run; elapsed_s: seconds it took."""


class FixedBudget:
    """The same in every step."""

    name = "fixed"

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def tokens(self, running: SequenceOf[Sequence], waiting_tokens: int) -> int:
        return self._tokens

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """Of no account here."""
