"""`python -m tests.chaos`: 200 SIGKILLs and 50 SIGSTOPs over 20,000 streams; prints a report."""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.chaos.run import scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--streams", type=int, default=20_000, help="at least so many")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, nargs=2, default=(0.3, 1.0), help="seconds between faults, from, to"
    )
    args = parser.parse_args()
    report = asyncio.run(
        scenario(
            args.kills,
            args.stops,
            args.concurrent,
            args.streams,
            args.seed,
            pause_s=tuple(args.pause),
        )
    )
    print("\n".join(report.lines()))
    return int(bool(report.wrong) or len(report.failed) > 0.001 * report.streams)


if __name__ == "__main__":
    sys.exit(main())
