"""`python -m tests.docs`: run the commands whose output is shown, and write what they print."""

from __future__ import annotations

import contextlib
import io
import sys

from cluster import cli
from tests.docs.pages import commands
from tests.docs.ways import argv


def main() -> int:
    shown = [c for c in commands() if c.output is not None]
    # From the end, so that the places before it stay right.
    for command in reversed(shown):
        assert command.output is not None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = cli.main(argv(command.text))
        if code:
            return code
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        text = "\n".join(line for line in lines if line) + "\n"
        block, page = command.output, command.page
        before = page.read_text("utf-8")
        end = block.start + len(block.text)
        page.write_text(before[: block.start] + text + before[end:], "utf-8")
        print(command, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
