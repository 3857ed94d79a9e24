"""A random life of one scheduler over the shadow KV cache: every invariant after every step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cluster.core.config import SchedulerConfig
from cluster.core.errors import InvalidRequest
from cluster.core.invariants import check_idle, check_plan, check_scheduler
from cluster.core.lifecycle import State
from cluster.core.plan import StepPlan
from cluster.core.policies import make_policies
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Scheduler
from cluster.sim.shadow import ShadowExecutor, reference_output

VOCAB = 31


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
        batching=st.sampled_from(["chunked", "continuous", "fused", "static", "dynamic"]),
    )
    def start(
        self,
        budget: int,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        watermark: float,
        max_preemptions: int,
        batching: str,
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
        self.scheduler = Scheduler(
            self.config, make_policies(batching, batch_size=max_num_seqs, max_queue_delay_s=0.03)
        )
        self.executor = ShadowExecutor(num_blocks=num_blocks, block_size=block_size, vocab=VOCAB)
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.dropped: set[int] = set()
        self.finished: set[int] = set()
        self.flying: StepPlan | None = None
        self.now = 0.0

    @rule(
        target=live,
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        emitted=st.integers(0, 5),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        temperature: float,
        stops: list[int],
        emitted: int,
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
        request = EngineRequest(tuple(prompt), sampling, tuple(already))
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
        if self.flying is None:
            self._launch()

    @rule()
    def land(self) -> None:
        if self.flying is not None:
            self._land()

    @rule(count=st.integers(1, 30))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            if self.flying is None and not self._launch():
                return
            self._land()

    def _launch(self) -> bool:
        runnable = any(s.state is not State.PAUSED for s in self.scheduler.sequences())
        plan = self.scheduler.plan(self.now)
        while plan is None and self.scheduler.next_wake_s is not None:
            self.now = max(self.now, self.scheduler.next_wake_s)
            plan = self.scheduler.plan(self.now)
        if plan is None:
            # Work is present: it is planned, or there is a named cause to wait.
            assert not runnable or self.scheduler.wait_cause
            assert not runnable or self.scheduler.batching.name == "static"
            return False
        check_plan(plan, self.scheduler)
        self.flying = plan
        self.flying_result = self.executor.submit(plan).wait()
        return True

    def _land(self) -> None:
        assert self.flying is not None
        self.flying = None
        self.now += 0.01
        for seq_id, index, token, finish in self.scheduler.commit(self.flying_result).outcomes:
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
        while self.scheduler.sequences() or self.flying is not None:
            if self.flying is None:
                assert self._launch()
            self._land()
            steps += 1
            assert steps < 20_000, "no progress"
        check_idle(self.scheduler)
        assert self.finished == set(self.expected) - self.dropped


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
