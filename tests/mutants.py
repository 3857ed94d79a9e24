# ruff: noqa: E501  (the lines are quotations)
"""Wrong lines that a person could have written, and whether the tests notice.

`python -m tests.mutants` copies the sources, breaks one line at a time, and runs random schedules
and then the core's unit tests on the copy. Prints a line per mutant; exit code 1 if fewer than 95%
are killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
REQUIRED = 0.95
SCHEDULES = "3000"
TESTS = ["tests/unit/core", "tests/unit/fleet", "tests/property/test_scheduler_machine.py"]


class Mutant(NamedTuple):
    """In cluster/{file}: `old`, which occurs exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "computed kept after preemption",
        "core/kvspace.py",
        "        self._give_back(sequence.surrender())\n        sequence.hold(0)\n",
        "        self._give_back(sequence.surrender())\n",
    ),
    Mutant(
        "victim left in the running set",
        "core/scheduler.py",
        "            self.running.remove(sequence)\n",
        "            pass\n",
    ),
    Mutant(
        "victim not released at the workers",
        "core/scheduler.py",
        "            self.running.remove(sequence)\n            self._released.append(sequence.seq_id)\n",
        "            self.running.remove(sequence)\n",
    ),
    Mutant(
        "blocks freed while a step writes to them",
        "core/kvspace.py",
        "            self._pending.append((self._launched, blocks))",
        "            self.pool.release(blocks)",
    ),
    Mutant(
        "pending blocks never freed",
        "core/kvspace.py",
        "            self.pool.release(due)\n",
        "",
    ),
    Mutant(
        "grows one block too late at a block's edge",
        "core/scheduler.py",
        "[] if end <= sequence.capacity else",
        "[] if end <= sequence.capacity + 1 else",
    ),
    Mutant(
        "grows by a block less than it must",
        "core/kvspace.py",
        "self.grow(sequence, -(-(end - sequence.capacity) // self.block_size))",
        "self.grow(sequence, (end - sequence.capacity) // self.block_size)",
    ),
    Mutant(
        "draft forgets what running sequences need",
        "core/draft.py",
        "            self.needed += -(-missing // self._block_size)",
        "            self.needed += missing // self._block_size",
    ),
    Mutant(
        "samples one token early",
        "core/scheduler.py",
        "samples = end == len(sequence.tokens)\n            rows.append(Row(sequence.seq_id, start, count, samples, new_blocks))",
        "samples = end >= len(sequence.tokens) - 1\n            rows.append(Row(sequence.seq_id, start, count, samples, new_blocks))",
    ),
    Mutant(
        "token of a sequence that left is kept",
        "core/scheduler.py",
        "            if sequence.state is not State.RUNNING or sequence.admission > flight.admissions:",
        "            if sequence.admission > flight.admissions:",
    ),
    Mutant(
        "one token too many",
        "core/scheduler.py",
        "elif end + 1 >= sequence.max_total:",
        "elif end >= sequence.max_total:",
    ),
    Mutant(
        "min_tokens off by one",
        "core/scheduler.py",
        "index + 1 >= sequence.sampling.min_tokens",
        "index > sequence.sampling.min_tokens",
    ),
    Mutant(
        "index counts the prompt's last token",
        "core/scheduler.py",
        "            index = end - sequence.prompt_len\n",
        "            index = end - sequence.prompt_len + 1\n",
    ),
    Mutant(
        "a newcomer after a preemption in the same step",
        "core/scheduler.py",
        "                self._make_room()\n            waiting = ()",
        "                self._make_room()",
    ),
    Mutant(
        "the preempted go to the back of the queue",
        "core/scheduler.py",
        "            self._book_recompute(victim, computed)\n        self.queue.push_returning(victim)",
        "            self._book_recompute(victim, computed)\n        self.queue.push(victim)",
    ),
    Mutant(
        "protection never sets in",
        "core/admission.py",
        "        return sequence.preemptions >= self._config.max_preemptions",
        "        return sequence.preemptions > self._config.max_preemptions",
    ),
    Mutant(
        "the protected come back without their whole life's blocks",
        "core/admission.py",
        "self._protected if self.is_protected(sequence) else self._reservation",
        "self._reservation",
    ),
    Mutant(
        "the watermark locks a lone sequence out",
        "core/admission.py",
        "        if not running:\n",
        "        if False:\n",
    ),
    Mutant(
        "the watermark is forgotten",
        "core/admission.py",
        "        if needed + watermark > free_blocks:",
        "        if needed > free_blocks:",
    ),
    Mutant(
        "one sequence too many runs",
        "core/admission.py",
        "        return running < self._config.max_num_seqs",
        "        return running <= self._config.max_num_seqs",
    ),
    Mutant(
        "a block is freed with readers left",
        "core/blocks.py",
        "            if references[block] == 0:\n                if block in self._hash_of",
        "            if references[block] <= 1:\n                if block in self._hash_of",
    ),
    Mutant(
        "an evicted block is still found by its contents",
        "core/blocks.py",
        "            del self._block_of[self._hash_of.pop(block)]\n",
        "            self._hash_of.pop(block)\n",
    ),
    Mutant(
        "the whole prompt counts as a prefix hit",
        "core/prefix.py",
        "        usable = (sequence.total - 1) // self._block_size\n        self._extend",
        "        usable = sequence.total // self._block_size\n        self._extend",
    ),
    Mutant(
        "a block is published before it is full",
        "core/prefix.py",
        "        full = sequence.settled // self._block_size\n",
        "        full = -(-sequence.settled // self._block_size)\n",
    ),
    Mutant(
        "the hash covers the block but not what precedes it",
        "core/prefix.py",
        "    return blake2b(parent + array(",
        '    return blake2b(b"" + array(',
    ),
    Mutant(
        "tenants share prefixes",
        "core/prefix.py",
        "    return blake2b(tenant.encode(), digest",
        '    return blake2b(b"", digest',
    ),
    Mutant(
        "a copied block may have been reused",
        "core/prefix.py",
        "        if pool.birth(end.block) != end.birth:",
        "        if False:",
    ),
    Mutant(
        "the copy holds one token less than is counted",
        "core/kvspace.py",
        "        sequence.hold(sequence.computed + partial.tokens)\n",
        "        sequence.hold(sequence.computed + partial.tokens + 1)\n",
    ),
    Mutant(
        "swapped-in blocks in the wrong order",
        "core/kvspace.py",
        "zip(sequence.host_blocks, sequence.blocks, strict=False):\n            self._swap_in",
        "zip(reversed(sequence.host_blocks), sequence.blocks, strict=False):\n            self._swap_in",
    ),
    Mutant(
        "host memory is never given back",
        "core/kvspace.py",
        "        self._host_free.extend(sequence.host_blocks)\n        sequence.host_blocks = []\n\n    def copy",
        "        sequence.host_blocks = []\n\n    def copy",
    ),
    Mutant(
        "an aborted swapped sequence keeps its host memory",
        "core/kvspace.py",
        "        self._host_free.extend(sequence.host_blocks)\n        sequence.host_blocks = []\n\n    def evict",
        "        sequence.host_blocks = []\n\n    def evict",
    ),
    Mutant(
        "decodes over budget do not rotate",
        "core/batching/base.py",
        "sorted(decodes, key=lambda s: s.turn)",
        "list(decodes)",
    ),
    Mutant(
        "prompts before decodes",
        "core/batching/chunked.py",
        "        give_decodes(draft, decodes)\n        give_chunks(draft, prefills)\n",
        "        give_chunks(draft, prefills)\n        give_decodes(draft, decodes)\n",
    ),
    Mutant(
        "the budget is overdrawn by a chunk",
        "core/batching/base.py",
        "        draft.give(sequence, min(sequence.remaining, draft.budget))",
        "        draft.give(sequence, sequence.remaining)",
    ),
    Mutant(
        "padding moves on",
        "core/scheduler.py",
        "Row(member.seq_id, member.computed - 1, 1, False, [])",
        "Row(member.seq_id, member.computed, 1, False, [])",
    ),
    Mutant(
        "a batch never ends",
        "core/scheduler.py",
        "        if self.padding and not self.running:\n",
        "        if self.padding and self.running:\n",
    ),
    Mutant(
        "a request is refused one token early",
        "core/request.py",
        "    if request.max_total <= limit:",
        "    if request.max_total < limit:",
    ),
    Mutant(
        "equals swap places by rank",
        "core/queues/keyed.py",
        "        return waiting.priority > running.priority and self.key(waiting) < self.key(running)",
        "        return waiting.priority >= running.priority",
    ),
    Mutant(
        "the first in line is the last",
        "core/queues/fcfs.py",
        "        insort(self._returning, sequence, key=lambda s: s.rank)",
        "        insort(self._returning, sequence, key=lambda s: -s.rank)",
    ),
    Mutant(
        "the victim outranks the one it makes room for",
        "core/scheduler.py",
        "        lowest = min(s.priority for s in candidates)",
        "        lowest = max(s.priority for s in candidates)",
    ),
    Mutant(
        "a result of an earlier stay is taken",
        "core/scheduler.py",
        "            if sequence.state is not State.RUNNING or sequence.admission > flight.admissions:",
        "            if sequence.state is not State.RUNNING:",
    ),
    Mutant(
        "what was in flight stays with a sequence that leaves",
        "core/scheduler.py",
        "            sequence.rewind()\n            self.running.remove(sequence)\n",
        "            self.running.remove(sequence)\n",
    ),
    Mutant(
        "a step beyond the last token",
        "core/scheduler.py",
        "        return [s for s in self.running if len(s.tokens) < s.max_total]",
        "        return self.running",
    ),
    Mutant(
        "blocks come back with the oldest step in flight",
        "core/kvspace.py",
        "            self._pending.append((self._launched, blocks))",
        "            self._pending.append((self._settled + 1, blocks))",
    ),
    Mutant(
        "a victim with a row in flight",
        "core/scheduler.py",
        "                if self._flights:\n                    return None\n",
        "",
    ),
    Mutant(
        "blocks shared before they are computed",
        "core/prefix.py",
        "        full = sequence.settled // self._block_size\n",
        "        full = sequence.computed // self._block_size\n",
    ),
    Mutant(
        "a stale epoch is accepted",
        "fleet/token_log.py",
        "        if epoch != self._epoch or self.finish is not None:",
        "        if self.finish is not None:",
    ),
    Mutant(
        "a token is taken twice",
        "fleet/token_log.py",
        "        fresh = token_ids[held - first_index :]",
        "        fresh = token_ids",
    ),
    Mutant(
        "a gap in the log goes unnoticed",
        "fleet/token_log.py",
        "        if first_index > held:",
        "        if False:",
    ),
]


def killed_by(mutant: Mutant, workspace: Path) -> str:
    """The step that noticed; "" if none did."""
    source = workspace / "cluster" / mutant.file
    original = source.read_text()
    if original.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} occurs {original.count(mutant.old)} times")
    source.write_text(original.replace(mutant.old, mutant.new))
    try:
        schedules = ["-m", "tests.property.schedules", "--count", SCHEDULES]
        if not _passes(schedules, workspace):
            return "schedules"
        if not _passes(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS], workspace):
            return "tests"
        return ""
    finally:
        source.write_text(original)


def _passes(command: list[str], workspace: Path) -> bool:
    environment = {**os.environ, "PYTHONPATH": f"{workspace}:{workspace / 'proto'}"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=workspace,
            env=environment,
            capture_output=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m.name]
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        for part in ("cluster", "tests", "proto"):
            shutil.copytree(ROOT / part, workspace / part)
        shutil.copy(ROOT / "pyproject.toml", workspace)
        for mutant in chosen:
            started = time.monotonic()
            by = killed_by(mutant, workspace)
            killed += bool(by)
            seconds = time.monotonic() - started
            print(f"{'killed by ' + by if by else 'SURVIVED':20} {seconds:5.1f} s  {mutant.name}")
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed >= REQUIRED * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
