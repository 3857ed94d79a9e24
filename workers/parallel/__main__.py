"""`python -m workers.parallel SOCKET RANK`: one rank of a tensor-parallel group."""

from __future__ import annotations

import logging
import signal
import sys

from workers.parallel.rank import serve_rank

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    # Ctrl-C ends the engine, and the engine ends its ranks: after its last step, not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(serve_rank(sys.argv[1], int(sys.argv[2])))
