"""Compile the kernels now, say when a container image is built: `python -m workers.native`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workers.native.build import BuildError, build
from workers.native.levels import LEVELS, usable_levels


def main(argv: Sequence[str] = ()) -> int:
    """Print the paths of what was built; 1 when nothing can be built."""
    parser = argparse.ArgumentParser(prog="python -m workers.native", description=__doc__)
    parser.add_argument(
        "--all",
        action="store_true",
        help="every level that the compiler knows, for an image that runs on other CPUs too; "
        "without it the best one for this CPU",
    )
    every = parser.parse_args(argv).all
    built = 0
    for level in LEVELS if every else usable_levels():
        try:
            print(build(level))
        except BuildError as error:
            print(f"level {level.name}: {error}", file=sys.stderr)
        else:
            built += 1
            if not every:
                break
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
