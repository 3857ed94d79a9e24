"""One step on the device: inputs in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from cluster.core.ids import SequenceId
from cluster.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprob
from workers.blockmoves import BlockMover
from workers.feed import TokenFeed, start_reading
from workers.inputs import InputBuilder, StepInputs
from workers.logprobs import token_logprobs
from workers.parallel.collectives import Alone, Collectives
from workers.passes import Passes
from workers.sampler import FAILED_TOKEN, Draw, Drawn, draw_ids, drawn_from
from workers.sequences import Expected, SequenceTable

_ALONE = Alone()


class RunningStep(Protocol):
    def wait(self) -> StepResult:
        """Read what was sampled. elapsed_s is left to the caller. Idempotent."""


class _Empty:
    """A step without rows."""

    def __init__(self, step: int) -> None:
        self._step = step

    def wait(self) -> StepResult:
        return StepResult(self._step, [])


class _Sampled:
    """A step that is queued on the device, with its ids on their way to the host."""

    def __init__(
        self,
        step: int,
        seq_ids: list[SequenceId],
        expected: list[Expected],
        read: Callable[[], list[int]],
        table: SequenceTable,
    ) -> None:
        """seq_ids, expected: of the rows that sample."""
        self._seq_ids = seq_ids
        self._expected = expected
        self._read = read
        self._table = table
        self._result = StepResult(step, [])
        self._drawn: Drawn | None = None

    def wait(self) -> StepResult:
        self.drawn()
        return self._result

    def drawn(self) -> Drawn:
        """The ids, now also in the sequence table. Waits for them."""
        if self._drawn is None:
            drawn = self._drawn = drawn_from(self._read())
            for expected, token_id in zip(self._expected, drawn.token_ids, strict=True):
                self._table.settle(expected, None if token_id == FAILED_TOKEN else token_id)
            self._result.token_ids = drawn.token_ids
            self._result.failed = {
                self._seq_ids[row]: reason for row, reason in drawn.failed.items()
            }
        return self._drawn

    def note_scores(
        self,
        chosen: dict[SequenceId, TokenLogprob],
        prompts: dict[SequenceId, PromptLogprobs],
    ) -> None:
        """What the result has to say besides the ids."""
        self._result.logprobs, self._result.prompt_logprobs = chosen, prompts


class ModelRunner:
    """Applies plans, one after the other, to a loaded model. A plan may come before the ids of the
    one before have been read: rows that need them find them on the device."""

    def __init__(
        self,
        passes: Passes,
        table: SequenceTable,
        inputs: InputBuilder,
        mover: BlockMover,
        feed: TokenFeed,
        collectives: Collectives = _ALONE,
    ) -> None:
        """feed: where `passes` look for ids as well."""
        self._passes = passes
        self._table = table
        self._inputs = inputs
        self._mover = mover
        self._feed = feed
        self._collectives = collectives
        self._newest: _Sampled | None = None

    def submit(self, plan: StepPlan) -> RunningStep:
        """Move blocks, forget, take in, run, sample.

        In a group, rank 0 draws for all; the others' results hold the ids and nothing else.
        Raises RuntimeError for a plan that contradicts the state held here, and whatever torch
        raises; in both cases the state is undefined afterwards.
        """
        self._mover.apply(plan)
        for seq_id in plan.released:
            self._table.release(seq_id)
        for new in plan.admitted:
            self._table.admit(new)
        if not plan.rows:
            return _Empty(plan.step)
        step = self._passes.build(self._inputs, plan)
        # Looked up before this step's own tokens count.
        draws = self._draws(step)
        with torch.inference_mode():
            logits = self._passes.logits(step)
            token_ids = self._sample(step, logits, draws)
            if token_ids is not None:
                self._feed.take(step, token_ids)
            sampled = _Sampled(
                plan.step,
                [row.seq_id for row in plan.rows if row.samples],
                [self._table.expect(lane) for lane in step.lanes],
                # Also where nothing was sampled: to wait for a step is to know that it is done.
                start_reading(step.sampled if token_ids is None else token_ids),
                self._table,
            )
            if logits is not None and self._is_scored(step, draws):
                # Now: the next step writes its logits over these.
                sampled.note_scores(*self._score(plan, step, logits, draws, sampled.drawn()))
        self._newest = sampled
        return sampled

    def _draws(self, step: StepInputs) -> list[Draw]:
        if self._newest is not None and any(map(self._table.reads_history, step.lanes)):
            self._newest.drawn()
        return [Draw(*self._table.sampling(lane)) for lane in step.lanes]

    def _sample(
        self, step: StepInputs, logits: torch.Tensor | None, draws: list[Draw]
    ) -> torch.Tensor | None:
        """Ids of the rows that sample, on the device and on every rank; None if none does."""
        if not draws:
            return None
        if logits is not None:
            token_ids = draw_ids(logits[: len(draws)], draws)
        else:
            token_ids = torch.zeros_like(step.sampled)
        if self._collectives.shard.size == 1:
            return token_ids
        return self._collectives.broadcast(token_ids.to(torch.int32))

    @staticmethod
    def _is_scored(step: StepInputs, draws: list[Draw]) -> bool:
        return bool(step.scored) or any(draw.params.logprobs is not None for draw in draws)

    def _score(
        self,
        plan: StepPlan,
        step: StepInputs,
        logits: torch.Tensor,
        draws: list[Draw],
        drawn: Drawn,
    ) -> tuple[dict[SequenceId, TokenLogprob], dict[SequenceId, PromptLogprobs]]:
        """Log-probabilities of drawn tokens and of prompt tokens, of those who asked for them."""
        params = [draw.params for draw in draws]
        wanted = [
            row
            for row, asked in enumerate(params)
            if asked.logprobs is not None and row not in drawn.failed
        ]
        sampled = [row.seq_id for row in plan.rows if row.samples]
        entries = token_logprobs(
            logits[wanted],
            [drawn.token_ids[row] for row in wanted],
            [params[row].logprobs or 0 for row in wanted],
        )
        chosen = {sampled[row]: entry for row, entry in zip(wanted, entries, strict=True)}
        prompts: dict[SequenceId, PromptLogprobs] = {}
        at = len(step.lanes)
        for row, lane, first, count, top in step.scored:
            ids = self._table.token_ids[lane, first : first + count].tolist()
            scores = token_logprobs(logits[at : at + count], ids, [top] * count)
            prompts[plan.rows[row].seq_id] = PromptLogprobs(first, scores)
            at += count
        return chosen, prompts
