"""Random short lives of a scheduler by seed, many per second: `python -m tests.property.schedules`.

Each seed draws a configuration, policies and a script of arrivals, aborts, pauses and steps, runs
it over the shadow KV cache with every invariant checked after every step, and compares all tokens
with the solo run. Odd seeds plan each step before the result of the one before is there. A failing
seed fails again: `--first SEED --count 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter, deque

from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError, InvalidRequest, InvariantViolation
from cluster.core.invariants import check_idle, check_plan, check_scheduler
from cluster.core.lifecycle import State
from cluster.core.policies import (
    BATCHING,
    BUDGETS,
    PREEMPTIONS,
    PREFIX_CACHE,
    QUEUES,
    RESERVATIONS,
    VICTIMS,
    PolicyChoice,
)
from cluster.core.preemption import SwapCosts
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Scheduler
from cluster.engine.executor import PendingStep
from cluster.sim.shadow import ShadowExecutor, reference_output
from tests.lagging import LaggingShadow

VOCAB = 23
STEM = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
MAX_STEPS = 3000
COUNTED = ("preemptions", "swapped_blocks", "prefix_hit_tokens", "padded_tokens", "wasted_rows")


class Schedule:
    """One random life."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.config = SchedulerConfig(
            max_num_batched_tokens=rng.randint(1, 24),
            max_num_seqs=rng.randint(1, 5),
            block_size=rng.randint(1, 5),
            num_blocks=rng.randint(3, 16),
            max_model_len=40,
            watermark=rng.choice([0.0, 0.0, 0.1]),
            max_preemptions=rng.randint(0, 4),
        )
        self.choice, self.scheduler = self._scheduler()
        self.executor = (ShadowExecutor, LaggingShadow)[seed % 2](
            num_blocks=self.config.num_blocks, block_size=self.config.block_size, vocab=VOCAB
        )
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.live: list[int] = []
        self.flying: deque[PendingStep] = deque()
        self.now = 0.0
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Returns what happened, by name. Raises InvariantViolation or AssertionError."""
        for _ in range(self.rng.randint(4, 30)):
            self.rng.choice(
                [self.arrive, self.arrive, self.step, self.step, self.step, self.launch, self.leave]
            )()
        self.drain()
        counters = self.scheduler.counters
        for name in COUNTED:
            self.seen[name] += getattr(counters, name) > 0
        return self.seen

    def arrive(self) -> None:
        rng = self.rng
        prompt = STEM[: rng.choice([0, 0, 4, 8, 11])] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))
        ]
        max_tokens = rng.randint(1, 10)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, max_tokens]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            stop_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 2]))),
        )
        full = reference_output(prompt or [0], sampling, VOCAB)
        emitted = tuple(full[: rng.choice([0, 0, len(full) // 2])])
        request = EngineRequest(
            tuple(prompt or [0]),
            sampling,
            emitted,
            rng.randint(0, 2),
            rng.choice("ab"),
            rng.choice([None, 0.02]),
        )
        fits = request.max_total <= self.config.max_sequence_len
        try:
            seq_id = self.scheduler.add(request, self.now).seq_id
        except InvalidRequest:
            assert not fits
            return
        assert fits
        self.expected[seq_id] = full
        self.received[seq_id] = list(emitted)
        self.live.append(seq_id)

    def leave(self) -> None:
        if not self.live:
            return
        seq_id = self.rng.choice(self.live)
        verb = self.rng.choice(["abort", "pause", "pause", "resume"])
        known = self.scheduler.get(seq_id)
        if verb == "abort":
            assert self.scheduler.abort(seq_id) is (known is not None)
            if known is not None:
                del self.expected[seq_id], self.received[seq_id]
                self.live.remove(seq_id)
        elif verb == "pause":
            self.scheduler.pause(seq_id)
        else:
            self.scheduler.resume(seq_id)
        check_scheduler(self.scheduler)

    def step(self) -> None:
        self.launch()
        self.land()

    def launch(self) -> bool:
        """Whether a step is under way."""
        if len(self.flying) == self.executor.pipeline_depth:
            return True
        plan = self.scheduler.plan(self.now)
        if plan is None and self.scheduler.next_wake_s is not None:
            self.now = max(self.now, self.scheduler.next_wake_s)
            plan = self.scheduler.plan(self.now)
        if plan is None and self.flying:
            return True
        if plan is None:
            runnable = any(s.state is not State.PAUSED for s in self.scheduler.sequences())
            assert not runnable or self.choice.batching == "static", self.scheduler.wait_cause
            return False
        check_plan(plan, self.scheduler)
        self.seen["copies"] += bool(plan.copies)
        self.seen["overlaps"] += bool(self.flying)
        self.flying.append(self.executor.submit(plan))
        return True

    def land(self) -> None:
        if not self.flying:
            return
        result = self.flying.popleft().wait()
        result.elapsed_s = self.rng.choice([0.001, 0.01, 0.1])
        self.now += result.elapsed_s
        for seq_id, index, token, finish in self.scheduler.commit(result).outcomes:
            received = self.received[seq_id]
            assert index == len(received)
            received.append(token)
            if finish is not None:
                assert received == self.expected[seq_id]
                self.live.remove(seq_id)
        check_scheduler(self.scheduler)

    def drain(self) -> None:
        self.scheduler.close_arrivals()
        for sequence in self.scheduler.sequences():
            self.scheduler.resume(sequence.seq_id)
        for _ in range(MAX_STEPS):
            if not self.launch():
                break
            self.land()
        assert not self.live, f"{self.live} never ended"
        check_idle(self.scheduler)
        assert self.received == self.expected

    def _scheduler(self) -> tuple[PolicyChoice, Scheduler]:
        rng = self.rng
        preemption = rng.choice(PREEMPTIONS)
        choice = PolicyChoice(
            batching=rng.choice([*BATCHING, "chunked", "chunked"]),
            queue=rng.choice(QUEUES),
            reservation=rng.choice(RESERVATIONS),
            victims=rng.choice(VICTIMS),
            preemption=preemption,
            prefix_cache=rng.choice(PREFIX_CACHE),
            budget=rng.choice(BUDGETS),
            max_queue_delay_s=0.03,
            aging_s=rng.choice([0.02, 1.0]),
            fair_quantum=rng.choice([1, 10]),
            host_blocks=rng.randint(1, 12) if preemption == "swap" else 0,
            swap_costs=SwapCosts(1.0, 1e9),
        )
        for plainer in (choice, dataclasses.replace(choice, queue="fcfs", budget="fixed")):
            try:
                policies = plainer.build(
                    batch_size=self.config.max_num_seqs,
                    block_size=self.config.block_size,
                    max_tokens=self.config.max_num_batched_tokens,
                )
            except ConfigError:
                continue
            return plainer, Scheduler(self.config, policies)
        raise AssertionError(f"no such combination: {choice}")


def run_many(first: int, count: int) -> Counter[str]:
    """Run seeds [first, first + count). Raises AssertionError naming the first that fails."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        schedule = Schedule(seed)
        try:
            seen += schedule.run()
        except (AssertionError, InvariantViolation, KeyError, IndexError, ValueError) as error:
            raise AssertionError(f"seed {seed} ({schedule.choice}): {error!r}") from error
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000)
    args = parser.parse_args()
    started, chunk = time.monotonic(), 5000
    for first in range(args.first, args.first + args.count, chunk):
        run_many(first, min(chunk, args.first + args.count - first))
        done = first + chunk - args.first
        print(f"{done} schedules, {done / (time.monotonic() - started):.0f}/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
