"""A random life of one scheduler over the shadow KV cache: every invariant after every step."""

from __future__ import annotations

import dataclasses
from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError, InvalidRequest
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

VOCAB = 31
STEMS = [list(range(17)), list(range(9)), [5] * 12]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share a beginning, so that blocks are shared and copied."""
    stem = draw(st.sampled_from([[], *STEMS]))
    cut = draw(st.integers(0, len(stem)))
    rest = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=24))
    return [*stem[:cut], *rest] or [1]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, pauses, resumes and steps in any order; tokens must equal the solo run."""

    live = Bundle("live")

    @initialize(
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 8),
        block_size=st.integers(1, 8),
        num_blocks=st.integers(2, 24),
        watermark=st.sampled_from([0.0, 0.02, 0.3]),
        max_preemptions=st.integers(0, 4),
        executor=st.sampled_from([ShadowExecutor, LaggingShadow]),
        choice=st.builds(
            PolicyChoice,
            batching=st.sampled_from(BATCHING),
            queue=st.sampled_from(QUEUES),
            reservation=st.sampled_from(RESERVATIONS),
            victims=st.sampled_from(VICTIMS),
            preemption=st.sampled_from(PREEMPTIONS),
            prefix_cache=st.sampled_from(PREFIX_CACHE),
            budget=st.sampled_from(BUDGETS),
            max_queue_delay_s=st.just(0.03),
            aging_s=st.sampled_from([0.05, 1.0]),
            fair_quantum=st.sampled_from([1, 7, 100]),
            host_blocks=st.integers(1, 20),
            swap_costs=st.sampled_from([SwapCosts(1.0, 1e9), SwapCosts(100.0, 100.0)]),
        ),
    )
    def start(  # noqa: PLR0913
        self,
        budget: int,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        watermark: float,
        max_preemptions: int,
        executor: type[ShadowExecutor],
        choice: PolicyChoice,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=64,
            watermark=watermark,
            max_preemptions=max_preemptions,
        )
        if choice.preemption == "recompute":
            choice = dataclasses.replace(choice, host_blocks=0)
        self.choice = choice
        try:
            policies = choice.build(
                batch_size=max_num_seqs, block_size=block_size, max_tokens=budget
            )
        except ConfigError:
            # Refused by name (tests/unit/core/test_policies.py); its plain sibling runs instead.
            choice = dataclasses.replace(choice, queue="fcfs", budget="fixed")
            policies = choice.build(
                batch_size=max_num_seqs, block_size=block_size, max_tokens=budget
            )
        self.scheduler = Scheduler(self.config, policies)
        self.executor = executor(num_blocks=num_blocks, block_size=block_size, vocab=VOCAB)
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.dropped: set[int] = set()
        self.finished: set[int] = set()
        self.flying: deque[PendingStep] = deque()
        self.now = 0.0

    @rule(
        target=live,
        prompt=prompts(),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        emitted=st.integers(0, 5),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["a", "b"]),
        objective=st.sampled_from([None, 0.01, 5.0]),
    )
    def add(  # noqa: PLR0913
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        temperature: float,
        stops: list[int],
        emitted: int,
        priority: int,
        tenant: str,
        objective: float | None,
    ) -> int:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            temperature=temperature,
            seed=len(prompt),
            stop_token_ids=tuple(stops),
        )
        full = reference_output(prompt, sampling, VOCAB)
        already = full[: min(emitted, len(full) - 1)]
        request = EngineRequest(
            tuple(prompt), sampling, tuple(already), priority, tenant, objective
        )
        try:
            seq_id = self.scheduler.add(request, self.now).seq_id
        except InvalidRequest:
            assert request.max_total > self.config.max_sequence_len
            return -1
        assert request.max_total <= self.config.max_sequence_len
        self.expected[seq_id] = full
        self.received[seq_id] = already
        return seq_id

    @rule(seq_id=consumes(live))
    def abort(self, seq_id: int) -> None:
        known = self.scheduler.get(seq_id) is not None
        assert self.scheduler.abort(seq_id) is known
        assert self.scheduler.abort(seq_id) is False
        if known:
            self.dropped.add(seq_id)

    @rule(seq_id=live)
    def pause_or_resume(self, seq_id: int) -> None:
        if not self.scheduler.resume(seq_id):
            self.scheduler.pause(seq_id)

    @rule()
    def launch(self) -> None:
        if len(self.flying) < self.executor.pipeline_depth:
            self._launch()

    @rule()
    def land(self) -> None:
        if self.flying:
            self._land()

    @rule(count=st.integers(1, 30))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            if not self._advance():
                return

    def _advance(self) -> bool:
        """As an engine's loop: plan as far ahead as the executor goes, then take a result."""
        while len(self.flying) < self.executor.pipeline_depth and self._launch():
            pass
        if self.flying:
            self._land()
            return True
        return False

    def _launch(self) -> bool:
        runnable = any(s.state is not State.PAUSED for s in self.scheduler.sequences())
        plan = self.scheduler.plan(self.now)
        while plan is None and self.scheduler.next_wake_s is not None:
            self.now = max(self.now, self.scheduler.next_wake_s)
            plan = self.scheduler.plan(self.now)
        if plan is None and self.flying:
            return False
        if plan is None:
            # Work is present: it is planned, or there is a named cause to wait.
            assert not runnable or self.scheduler.wait_cause
            assert not runnable or self.scheduler.batching.name == "static"
            return False
        check_plan(plan, self.scheduler)
        self.flying.append(self.executor.submit(plan))
        return True

    def _land(self) -> None:
        result = self.flying.popleft().wait()
        self.now += 0.01
        for seq_id, index, token, finish in self.scheduler.commit(result).outcomes:
            assert seq_id not in self.dropped
            assert index == len(self.received[seq_id])
            self.received[seq_id].append(token)
            if finish is not None:
                assert self.received[seq_id] == self.expected[seq_id]
                self.finished.add(seq_id)

    @invariant()
    def books_add_up(self) -> None:
        check_scheduler(self.scheduler)

    @invariant()
    def outputs_are_prefixes(self) -> None:
        for seq_id, ids in self.received.items():
            assert self.expected[seq_id][: len(ids)] == ids

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.close_arrivals()
        for sequence in self.scheduler.sequences():
            self.scheduler.resume(sequence.seq_id)
        steps = 0
        while self.scheduler.sequences() or self.flying:
            assert self._advance()
            steps += 1
            assert steps < 20_000, "no progress"
        check_idle(self.scheduler)
        assert self.finished == set(self.expected) - self.dropped


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
