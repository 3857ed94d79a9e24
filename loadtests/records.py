"""One request as the client saw it: a line of requests.jsonl, the source of everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError


@dataclass(slots=True)
class Record:
    """Times in seconds since the start of the schedule; -1 where the event never came.

    at_s: scheduled arrival, from which TTFT counts. warmup: not to be counted in distributions.
    tokens: ids received; expected: ids the server says it sent, -1 without Finished. faults: ids
    out of place (a gap or a repeat). messages: deliveries with ids. gaps_us: microseconds between
    these. wire_lag_us: the largest of receive time minus emit time. error: "" when it went well.
    queue_s, server_first_s, server_total_s: from the server's clock, None when it did not say.
    engine: the last one that worked on it, "" when the server did not say.
    """

    index: int
    kind: str
    tenant: int
    at_s: float
    warmup: bool = False
    sent_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    done_s: float = -1.0
    prompt_tokens: int = 0
    tokens: int = 0
    expected: int = -1
    faults: int = 0
    messages: int = 0
    gaps_us: list[int] = field(default_factory=list)
    wire_lag_us: int = 0
    error: str = ""
    queue_s: float | None = None
    server_first_s: float | None = None
    server_total_s: float | None = None
    preemptions: int = 0
    replays: int = 0
    priority: int = 0
    engine: str = ""

    @property
    def sent(self) -> bool:
        return self.sent_s >= 0.0

    @property
    def ok(self) -> bool:
        """Finished without an error, and with every token that the server counted."""
        return not self.error and self.first_s >= 0.0 and self.counts_agree

    @property
    def counts_agree(self) -> bool:
        return self.faults == 0 and self.expected in (-1, self.tokens)

    @property
    def send_lag_s(self) -> float:
        return self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1), as MLPerf defines it; None for a single token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.done_s - self.at_s

    def to_json(self) -> str:
        values: dict[str, Any] = asdict(self)
        for name, value in values.items():
            if isinstance(value, float):
                values[name] = round(value, 6)
        return json.dumps(values, separators=(",", ":"))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Record:
        known = {f.name for f in fields(Record)}
        return Record(**{k: v for k, v in values.items() if k in known})


def read_records(path: Path) -> Iterator[Record]:
    """Raises ConfigError for a file that is not one of ours."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Record.from_json(json.loads(line))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as requests: {error}") from None


def write_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(record.to_json() + "\n" for record in records)
