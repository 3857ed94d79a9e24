"""From a plan to the tensors of a step, written into buffers that are allocated once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cluster.core.config import blocks_for
from cluster.core.ids import NULL_BLOCK, BlockId, SequenceId
from cluster.core.plan import Row, StepPlan
from workers.attention.meta import StepMeta
from workers.layout import (
    LaidOut,
    NumpyLayout,
    RowFields,
    RowMisfit,
    StepBuffers,
    StepLayout,
    TooManyTokens,
)
from workers.models.base import Batch
from workers.native.build import BuildError
from workers.native.layout import NativeLayout
from workers.sequences import SequenceTable

NO_SLOT = -1
"""In a slot mapping: what is computed here is stored nowhere."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Sizes of the buffers. num_blocks: usable blocks, the null block not counted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int


class ScoredPrompt(NamedTuple):
    """Prompt tokens [first, first + count) of a lane, scored by the positions before them.
    row: in the plan. top: how many of the likeliest are wanted."""

    row: int
    lane: int
    first: int
    count: int  # type: ignore[assignment]  # a field here; nobody needs tuple.count
    top: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step ready to run. lanes: of the rows that sample, in row order; the first logits are
    theirs. scored: prompt positions whose logits follow, in this order.

    sampled: `lanes` on the device, int32. unread: whether ids stand as UNREAD_TOKEN in the batch;
    they are to be taken from what was sampled for their lanes. token_lanes: [T] int32, on the
    device; only where that may be so. padded: the batch has a size of its own; rows without a lane
    follow those with one.
    """

    batch: Batch
    meta: StepMeta
    lanes: list[int]
    scored: list[ScoredPrompt]
    sampled: torch.Tensor
    token_lanes: torch.Tensor
    unread: bool
    padded: bool = False


def make_layout(table: SequenceTable, buffers: StepBuffers) -> StepLayout:
    """The compiled one where it can be had."""
    try:
        return NativeLayout(table, buffers)
    except BuildError:
        return NumpyLayout(table, buffers)


class InputBuilder:
    """Checks a plan against the sequences held, and lays it out."""

    def __init__(self, table: SequenceTable, limits: InputLimits, device: torch.device) -> None:
        self._table = table
        self._limits = limits
        self._buffers = StepBuffers(
            limits.max_num_seqs, limits.max_num_batched_tokens, table.blocks.shape[1], device
        )
        self._layout = make_layout(table, self._buffers)

    def build(self, plan: StepPlan, at_least: int = 0) -> StepInputs:
        """Grant the rows' new blocks and write the step into the buffers.

        at_least: only for steps whose rows all decode; the step is padded to so many rows, and its
        meta holds for every step of that size (see `blank`).

        Raises RuntimeError for a plan that does not fit the sequences or the limits; the
        scheduler and the worker then disagree about the state, and no later step can be right.
        """
        self._buffers.take_turn()
        self._check_sizes(plan)
        lanes, fields = self._grant_all(plan)
        laid = self._lay_out(plan, fields, self._all_pages if at_least else 0)
        scored = self._scored(plan, lanes) if self._table.scores_prompts else []
        sampled = [lane for row, lane in zip(plan.rows, lanes, strict=True) if row.samples]
        if at_least:
            self._write_padding(len(lanes), at_least)
            return self._padded(at_least, sampled)
        num_logits = self._write_scored(laid.num_sampled, scored)
        return self._publish(laid, len(lanes), plan.num_decodes, num_logits, sampled, scored)

    def blank(self, rows: int) -> StepInputs:
        """A step of nothing but padding: what a graph for so many decodes is captured with."""
        self._buffers.take_turn()
        self._write_padding(0, rows)
        return self._padded(rows, [])

    def _write_padding(self, first: int, rows: int) -> None:
        """Rows [first, rows) read one token of the null block and write nothing."""
        buffers, pad = self._buffers, slice(first, rows)
        buffers.cu_seqlens_q.array[: rows + 1] = np.arange(rows + 1)
        buffers.logits_index.array[:rows] = np.arange(rows)
        buffers.seqused_k.array[pad] = 1
        buffers.block_table.array[pad] = NULL_BLOCK
        buffers.slot_mapping.array[pad] = NO_SLOT
        for buffer in (buffers.positions, buffers.token_ids, buffers.token_lanes):
            buffer.array[pad] = 0

    def _padded(self, rows: int, lanes: list[int]) -> StepInputs:
        """Publish a step of `rows` decodes. Whoever captures it finds later ones in its place, so
        its largest key count is the largest there can be."""
        laid = LaidOut(rows, rows, len(lanes), 1, self._table.max_model_len, True)
        return self._publish(laid, rows, rows, rows, lanes, [], padded=True)

    def _scored(self, plan: StepPlan, lanes: list[int]) -> list[ScoredPrompt]:
        """The prompt tokens that this step scores for sequences that asked for it."""
        scored: list[ScoredPrompt] = []
        for at, (row, lane) in enumerate(zip(plan.rows, lanes, strict=True)):
            top = self._table.prompt_top(lane)
            if top is None:
                continue
            # The logits of position p score the token at p + 1.
            count = min(row.start + row.count + 1, self._table.prompt_len(lane)) - row.start - 1
            if count > 0:
                scored.append(ScoredPrompt(at, lane, row.start + 1, count, top))
        return scored

    def _write_scored(self, at: int, scored: list[ScoredPrompt]) -> int:
        """The logits of scored prompts, after the `at` of the rows that sample. Returns how many
        there are in all."""
        index, bounds = self._buffers.logits_index.array, self._buffers.cu_seqlens_q.array
        positions = self._buffers.positions.array
        for prompt in scored:
            begin = int(bounds[prompt.row])
            begin += prompt.first - 1 - int(positions[begin])
            index[at : at + prompt.count] = np.arange(begin, begin + prompt.count)
            at += prompt.count
        return at

    # -- checks --------------------------------------------------------------------------------

    def _check_sizes(self, plan: StepPlan) -> None:
        limits = self._limits
        if not 1 <= len(plan.rows) <= limits.max_num_seqs:
            raise RuntimeError(
                f"plan {plan.step}: rows must be in [1, {limits.max_num_seqs}], "
                f"got {len(plan.rows)}"
            )
        if plan.num_tokens > limits.max_num_batched_tokens:
            raise self._too_many_tokens(plan, plan.num_tokens)

    def _too_many_tokens(self, plan: StepPlan, found: int) -> RuntimeError:
        most = self._limits.max_num_batched_tokens
        return RuntimeError(f"plan {plan.step}: at most {most} tokens per step, got {found}")

    def _grant_all(self, plan: StepPlan) -> tuple[list[int], RowFields]:
        """The rows' lanes, and the rows as a layout takes them."""
        lanes: list[int] = []
        fields: list[int] = []
        for seq_id, start, count, samples, new_blocks in plan.rows:
            if new_blocks:
                self._check_blocks(seq_id, new_blocks)
            lane = self._table.grant(seq_id, new_blocks)
            lanes.append(lane)
            fields += (lane, start, count, samples)
        if len(set(lanes)) != len(lanes):
            raise RuntimeError(f"plan {plan.step}: a sequence is in two rows")
        return lanes, array("q", fields)

    def _check_blocks(self, seq_id: SequenceId, blocks: list[BlockId]) -> None:
        low, high = min(blocks), max(blocks)
        if low < 1 or high > self._limits.num_blocks:
            raise RuntimeError(
                f"sequence {seq_id}: blocks must be in [1, {self._limits.num_blocks}], "
                f"got {low} to {high}"
            )

    # -- layout --------------------------------------------------------------------------------

    @property
    def _all_pages(self) -> int:
        return int(self._table.blocks.shape[1])

    def _lay_out(self, plan: StepPlan, fields: RowFields, all_pages: int) -> LaidOut:
        try:
            laid = self._layout.write(fields, all_pages)
        except RowMisfit as misfit:
            raise self._misfit(plan.rows[misfit.row]) from None
        except TooManyTokens as error:
            raise self._too_many_tokens(plan, error.num_tokens) from None
        if laid.num_tokens != plan.num_tokens:
            raise RuntimeError(f"plan {plan.step}: {laid.num_tokens} tokens, not {plan.num_tokens}")
        if not 0 <= plan.num_decodes <= laid.num_decodes:
            raise RuntimeError(
                f"plan {plan.step}: num_decodes {plan.num_decodes}, but {laid.num_decodes} leading "
                f"rows of {len(plan.rows)} have one token"
            )
        return laid

    def _misfit(self, row: Row) -> RuntimeError:
        table = self._table
        lane = table.grant(row.seq_id, [])
        return RuntimeError(
            f"sequence {row.seq_id}: start {row.start}, count {row.count}, samples {row.samples} "
            f"do not fit {table.lengths[lane]} tokens and blocks for "
            f"{table.num_blocks[lane] * table.block_size}"
        )

    def _publish(
        self,
        laid: LaidOut,
        num_seqs: int,
        num_decodes: int,
        num_logits: int,
        lanes: list[int],
        scored: list[ScoredPrompt],
        padded: bool = False,
    ) -> StepInputs:
        """What stands in the buffers, as the device sees it."""
        num_tokens, buffers = laid.num_tokens, self._buffers
        width = blocks_for(laid.max_k, self._table.block_size)
        meta = StepMeta(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            max_q=laid.max_q,
            max_k=laid.max_k,
            cu_seqlens_q=buffers.cu_seqlens_q.publish(num_seqs + 1),
            seqused_k=buffers.seqused_k.publish(num_seqs),
            block_table=buffers.block_table.publish(num_seqs, width),
            slot_mapping=buffers.slot_mapping.publish(num_tokens),
            positions=buffers.positions.publish(num_tokens),
            logits_index=buffers.logits_index.publish(num_logits),
        )
        return StepInputs(
            Batch(buffers.token_ids.publish(num_tokens), meta.positions, meta.logits_index),
            meta,
            lanes,
            scored,
            buffers.sampled.publish(laid.num_sampled),
            buffers.token_lanes.publish(num_tokens if laid.unread else 0),
            laid.unread,
            padded,
        )
