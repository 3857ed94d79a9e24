"""Whether this machine can measure at all: a server with known gaps, read back at full rate.

TPOT is held to the known gap, since nothing but the client can move an average of a hundred ticks.
Single gaps are held to the server's own emit times: a tick that came late was late for everybody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loadtests.collect import Results
from loadtests.job import ROOT, Job
from loadtests.runner import run_load
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec
from loadtests.validity import Check, Limits, validity_checks

P50_TOLERANCE = 0.02
P99_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """A load of so many tokens per second, each stream with `gap_ms` between its tokens."""

    tokens_per_s: float = 7500.0
    gap_ms: float = 10.0
    output: int = 200
    seconds: float = 10.0
    children: int = 1

    def scenario(self) -> Scenario:
        rate = self.tokens_per_s / self.output
        return Scenario(
            arrivals=f"constant:{rate:g}",
            requests=max(1, round(rate * self.seconds)),
            output_mean=self.output,
            output_cv=0.0,
            # Until as many streams run as will run all the time.
            warmup_s=self.output * self.gap_ms / 1e3,
        )

    def run(self) -> Results:
        with mock_process(self.gap_ms) as address:
            job = Job(self.scenario(), TargetSpec(address=address))
            return run_load(job, self.children)

    def checks(self, results: Results) -> list[Check]:
        """Known against read, on top of the run's validity."""
        seen, emitted = results.histograms["ITL"], results.histograms["ITL emitted"]
        tpot = results.histograms["TPOT"]
        wanted = (
            ("TPOT P50", tpot.percentile_ms(50), self.gap_ms, P50_TOLERANCE),
            ("TPOT P99", tpot.percentile_ms(99), self.gap_ms, P99_TOLERANCE),
            ("ITL P50", seen.percentile_ms(50), emitted.percentile_ms(50), P50_TOLERANCE),
            ("ITL P99", seen.percentile_ms(99), emitted.percentile_ms(99), P99_TOLERANCE),
        )
        found = [
            Check(
                name,
                f"{read:.3f} ms",
                f"{known:.3f} ms within {100 * tolerance:g}%",
                known > 0 and abs(read / known - 1) <= tolerance,
            )
            for name, read, known, tolerance in wanted
        ]
        return [*validity_checks(results, Limits()), *found]


@contextmanager
def mock_process(gap_ms: float) -> Iterator[str]:
    """The address of a mock server in a process of its own."""
    paths = (str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", ""))
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtests.mockserver", "--gap-ms", f"{gap_ms:g}"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )
    try:
        line = process.stdout.readline() if process.stdout is not None else b""
        yield f"127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
