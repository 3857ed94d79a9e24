"""One step on the device: inputs in, sampled tokens out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.ids import SequenceId, TokenId
from cluster.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprob
from workers.attention.backend import AttentionBackend, LayerCache
from workers.blockmoves import BlockMover
from workers.inputs import InputBuilder, StepInputs
from workers.logprobs import token_logprobs
from workers.models.base import Model
from workers.parallel.collectives import Alone, Collectives
from workers.sampler import FAILED_TOKEN, Draw, Drawn, sample
from workers.sequences import SequenceTable

_ALONE = Alone()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything a step runs on."""

    model: Model
    attention: AttentionBackend
    caches: list[LayerCache]


class ModelRunner:
    """Applies plans, one after the other, to a loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        table: SequenceTable,
        inputs: InputBuilder,
        mover: BlockMover,
        collectives: Collectives = _ALONE,
    ) -> None:
        self._loaded = loaded
        self._table = table
        self._inputs = inputs
        self._mover = mover
        self._collectives = collectives

    def run(self, plan: StepPlan) -> StepResult:
        """Move blocks, forget, take in, run, sample, append. elapsed_s is left to the caller.

        In a group, rank 0 draws for all; the others' results hold the ids and nothing else.
        Raises RuntimeError for a plan that contradicts the state held here, and whatever torch
        raises; in both cases the state is undefined afterwards.
        """
        self._mover.apply(plan)
        for seq_id in plan.released:
            self._table.release(seq_id)
        for new in plan.admitted:
            self._table.admit(new)
        result = StepResult(plan.step, [])
        if not plan.rows:
            return result
        step = self._inputs.build(plan)
        with torch.inference_mode():
            self._loaded.attention.plan(step.meta)
            logits = self._loaded.model.forward(
                step.batch, self._loaded.attention, self._loaded.caches
            )
            if logits is not None:
                self._draw(plan, step, logits, result)
            result.token_ids = self._share(result.token_ids, len(step.lanes))
        for lane, token_id in zip(step.lanes, result.token_ids, strict=True):
            if token_id == FAILED_TOKEN:
                self._table.end(lane)
            else:
                self._table.append(lane, token_id)
        return result

    def _draw(
        self, plan: StepPlan, step: StepInputs, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Draw for the rows that sample, into `result`."""
        draws = [Draw(*self._table.sampling(lane)) for lane in step.lanes]
        drawn = sample(logits[: len(draws)], draws)
        result.token_ids = drawn.token_ids
        sampled = [row.seq_id for row in plan.rows if row.samples]
        result.failed = {sampled[row]: reason for row, reason in drawn.failed.items()}
        result.logprobs, result.prompt_logprobs = self._score(plan, step, logits, drawn)

    def _share(self, token_ids: list[TokenId], count: int) -> list[TokenId]:
        """Rank 0's ids on every rank. count: how many there are."""
        if self._collectives.shard.size == 1 or count == 0:
            return token_ids
        device = self._loaded.caches[0].keys.device
        ids = torch.tensor(token_ids or [0] * count, dtype=torch.int32, device=device)
        return self._collectives.broadcast(ids).tolist()

    def _score(
        self, plan: StepPlan, step: StepInputs, logits: torch.Tensor, drawn: Drawn
    ) -> tuple[dict[SequenceId, TokenLogprob], dict[SequenceId, PromptLogprobs]]:
        """Log-probabilities of drawn tokens and of prompt tokens, of those who asked for them."""
        params = [self._table.sampling(lane)[0] for lane in step.lanes]
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
