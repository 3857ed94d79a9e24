"""Drives a scheduler over the shadow executor, checking the books at every step."""

from __future__ import annotations

from cluster.core.config import SchedulerConfig
from cluster.core.invariants import check_plan, check_scheduler
from cluster.core.outcome import Outcome
from cluster.core.plan import StepPlan
from cluster.core.request import EngineRequest
from cluster.core.reserve import KnownTokens
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Policies, Scheduler
from cluster.sim.shadow import ShadowExecutor, reference_output

VOCAB = 97


class Driver:
    """One engine's scheduler and executor in lockstep, without time."""

    def __init__(self, policies: Policies | None = None, **limits: float) -> None:
        values = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "block_size": 4,
            "num_blocks": 64,
            "max_model_len": 1 << 16,
            "watermark": 0.0,
        } | limits
        self.config = SchedulerConfig(**values)  # type: ignore[arg-type]
        # Without a forecast of the peak the pool is overcommitted: what these tests are about.
        policies = policies or Policies(reservation=KnownTokens())
        self.scheduler = Scheduler(self.config, policies)
        self.executor = ShadowExecutor(
            num_blocks=self.config.num_blocks, block_size=self.config.block_size, vocab=VOCAB
        )
        self.outputs: dict[int, list[int]] = {}
        self.requests: dict[int, EngineRequest] = {}
        self.plans: list[StepPlan] = []
        self.finished: dict[int, Outcome] = {}

    def add(self, prompt_len: int, max_tokens: int, **sampling: object) -> int:
        prompt = tuple((prompt_len * 13 + i * 5) % VOCAB for i in range(prompt_len))
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return self.submit(EngineRequest(prompt, params))

    def submit(self, request: EngineRequest) -> int:
        seq_id = self.scheduler.add(request, now=0.0).seq_id
        self.requests[seq_id] = request
        self.outputs[seq_id] = list(request.emitted_ids)
        return seq_id

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(now=float(len(self.plans)))
        if plan is None:
            return None
        check_plan(plan, self.scheduler)
        self.plans.append(plan)
        for outcome in self.scheduler.commit(self.executor.submit(plan).wait()).outcomes:
            assert outcome.index == len(self.outputs[outcome.seq_id])
            self.outputs[outcome.seq_id].append(outcome.token_id)
            if outcome.finish is not None:
                self.finished[outcome.seq_id] = outcome
        check_scheduler(self.scheduler)
        return plan

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if self.step() is None:
                assert len(self.scheduler) == 0, self.scheduler.wait_cause
                return
        raise AssertionError("no end in sight")

    def expected(self, seq_id: int) -> list[int]:
        request = self.requests[seq_id]
        return reference_output(list(request.prompt_ids), request.sampling, VOCAB)

    def assert_exact(self) -> None:
        for seq_id, output in self.outputs.items():
            assert output == self.expected(seq_id)
