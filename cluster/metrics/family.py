"""What a metric is, and how it is written in Prometheus' text format.

Names and labels are turned into text once; a scrape only adds the numbers. A general client library
takes some milliseconds for as many series, in which no step and no token gets the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, product
from math import prod

from cluster.metrics.histogram import SECONDS, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(str, Enum):
    COUNTER = "counter"
    """Only grows while its process lives."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all values it can have. Without values: one that the process knows at its start
    and never changes."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. unit: of its values; "" for plain numbers. help: one sentence."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[Label, ...] = ()

    @property
    def children(self) -> int:
        """Combinations of label values; each is there from the start, at 0."""
        return prod(max(1, len(label.values)) for label in self.labels)

    @property
    def series(self) -> int:
        """Time series of one process. A histogram has one per bucket, and sum and count."""
        per_child = len(SECONDS) + 3 if self.kind is Kind.HISTOGRAM else 1
        return self.children * per_child


class Lines:
    """One family's part of a scrape, all but the numbers written out beforehand.

    known: values of the labels that have none in the family.
    """

    def __init__(self, family: Family, known: dict[str, str] | None = None) -> None:
        self.family = family
        self._head = (
            f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind.value}\n"
        )
        values = [
            [_pair(label.name, value) for value in label.values or (_known(label.name, known),)]
            for label in family.labels
        ]
        labels = [",".join(pairs) for pairs in product(*values)]
        self._starts: list[str] = []
        if family.kind is Kind.HISTOGRAM:
            bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
            self._starts = [f'{family.name}_bucket{{le="{bound}"}} ' for bound in bounds]
        else:
            self._starts = [
                f"{family.name}{{{text}}} " if text else f"{family.name} " for text in labels
            ]

    def numbers(self, values: Iterable[float]) -> str:
        """Of a counter or gauge: one value per combination of label values, in their order."""
        pairs = zip(self._starts, values, strict=True)
        return self._head + "".join([f"{start}{value}\n" for start, value in pairs])

    def histogram(self, found: Histogram) -> str:
        """Of a histogram, which has no labels."""
        total, cumulative = found.total, list(accumulate(found.counts))
        pairs = zip(self._starts, cumulative, strict=True)
        buckets = "".join([f"{start}{count}\n" for start, count in pairs])
        name = self.family.name
        return f"{self._head}{buckets}{name}_sum {total}\n{name}_count {cumulative[-1]}\n"


def markdown(families: Sequence[Family]) -> str:
    """The families as a table for the docs."""
    rows = ["| metric | kind | unit | labels | series | what |", "|---|---|---|---|---|---|"]
    for family in families:
        labels = "; ".join(
            f"`{label.name}`: {', '.join(label.values) or 'one value'}" for label in family.labels
        )
        cells = (f"`{family.name}`", family.kind.value, family.unit, labels)
        rows.append(f"| {' | '.join(cells)} | {family.series} | {family.help} |")
    return "\n".join(rows)


def _known(name: str, known: dict[str, str] | None) -> str:
    return (known or {})[name]


def _pair(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'
