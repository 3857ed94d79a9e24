"""One step on the device: inputs in, sampled tokens out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.ids import SequenceId
from cluster.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprob
from workers.attention.backend import AttentionBackend, LayerCache
from workers.blockmoves import BlockMover
from workers.inputs import InputBuilder, StepInputs
from workers.logprobs import token_logprobs
from workers.models.base import Model
from workers.sampler import Draw, Drawn, sample
from workers.sequences import SequenceTable


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
    ) -> None:
        self._loaded = loaded
        self._table = table
        self._inputs = inputs
        self._mover = mover

    def run(self, plan: StepPlan) -> StepResult:
        """Move blocks, forget, take in, run, sample, append. elapsed_s is left to the caller.

        Raises RuntimeError for a plan that contradicts the state held here, and whatever torch
        raises; in both cases the state is undefined afterwards.
        """
        self._mover.apply(plan)
        for seq_id in plan.released:
            self._table.release(seq_id)
        for new in plan.admitted:
            self._table.admit(new)
        if not plan.rows:
            return StepResult(plan.step, [])
        step = self._inputs.build(plan)
        draws = [Draw(*self._table.sampling(lane)) for lane in step.lanes]
        with torch.inference_mode():
            self._loaded.attention.plan(step.meta)
            logits = self._loaded.model.forward(
                step.batch, self._loaded.attention, self._loaded.caches
            )
            if logits is None:
                raise RuntimeError("only the first rank of a group draws")
            drawn = sample(logits[: len(draws)], draws)
            chosen, prompts = self._score(plan, step, logits, drawn)
        result = StepResult(plan.step, drawn.token_ids, logprobs=chosen, prompt_logprobs=prompts)
        sampled = [row.seq_id for row in plan.rows if row.samples]
        for row, (lane, token_id) in enumerate(zip(step.lanes, drawn.token_ids, strict=True)):
            if row in drawn.failed:
                result.failed[sampled[row]] = drawn.failed[row]
                self._table.end(lane)
            else:
                self._table.append(lane, token_id)
        return result

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
