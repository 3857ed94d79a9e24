"""gloo groups that come and go in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from workers.parallel.collectives import Shard
from workers.parallel.torchdist import TorchGroup, create_store

ROUNDS = 12
WITHIN_S = 90.0


def rounds(groups) -> None:
    """A few collectives in each of `groups`, and its end right after."""
    for group in groups:
        for _ in range(3):
            group.all_reduce(torch.zeros(576, 512))
        group.close()


def main() -> None:
    if sys.argv[1:] == ["other"]:
        rounds(TorchGroup.join(Shard(1, 2), "gloo", int(line)) for line in sys.stdin)
        return
    other = subprocess.Popen([sys.executable, __file__, "other"], stdin=subprocess.PIPE, text=True)
    assert other.stdin is not None

    def groups():
        for _ in range(ROUNDS):
            store = create_store(2)
            other.stdin.write(f"{store.port}\n")
            other.stdin.flush()
            yield TorchGroup(Shard(0, 2), "gloo", store)

    rounds(groups())
    other.stdin.close()
    assert other.wait() == 0


def test_a_group_ends_right_after_its_last_collective():
    """In a process of its own: what hangs in gloo's destructor hears no signal."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, __file__],
        timeout=WITHIN_S,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{root}:{root / 'proto'}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
