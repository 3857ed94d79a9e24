"""Compile the kernels now, say when a container image is built: `python -m workers.native`."""

from __future__ import annotations

import sys

from workers.native.build import BuildError, build
from workers.native.levels import usable_levels


def main() -> int:
    """Build the best level for this CPU and print its path; 1 when none can be built."""
    for level in usable_levels():
        try:
            print(build(level))
            return 0
        except BuildError as error:
            print(f"level {level.name}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
