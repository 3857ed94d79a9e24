"""From a plan to the tensors of a step, written into buffers that are allocated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cluster.core.config import blocks_for
from cluster.core.ids import NULL_BLOCK
from cluster.core.plan import Row, StepPlan
from workers.attention.meta import StagedBuffer, StepMeta
from workers.models.base import Batch
from workers.sequences import UNREAD_TOKEN, SequenceTable

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


class InputBuilder:
    """Checks a plan against the sequences held, and lays it out."""

    def __init__(self, table: SequenceTable, limits: InputLimits, device: torch.device) -> None:
        self._table = table
        self._limits = limits
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._cu_seqlens_q = StagedBuffer((seqs + 1,), device)
        self._seqused_k = StagedBuffer((seqs,), device)
        self._block_table = StagedBuffer((seqs, table.blocks.shape[1]), device)
        self._slot_mapping = StagedBuffer((tokens,), device)
        self._positions = StagedBuffer((tokens,), device)
        self._token_ids = StagedBuffer((tokens,), device)
        self._logits_index = StagedBuffer((seqs + tokens,), device)
        self._token_lanes = StagedBuffer((tokens,), device)
        self._sampled = StagedBuffer((seqs,), device)

    def build(self, plan: StepPlan, at_least: int = 0) -> StepInputs:
        """Grant the rows' new blocks and write the step into the buffers.

        at_least: only for steps whose rows all decode; the step is padded to so many rows, and its
        meta holds for every step of that size (see `blank`).

        Raises RuntimeError for a plan that does not fit the sequences or the limits; the
        scheduler and the worker then disagree about the state, and no later step can be right.
        """
        rows = plan.rows
        self._check_sizes(plan)
        held = [self._grant(row) for row in rows]
        if len(set(held)) != len(held):
            raise RuntimeError(f"plan {plan.step}: a sequence is in two rows")
        # The model's step before has swept the processor's caches, so that what counts is how much
        # code and memory is touched: few functions of numpy, and none that it has in Python
        # (sum, any, max, np.cumsum).
        numbers = np.empty((4, len(rows)), dtype=np.int64)
        numbers[0] = held
        numbers[1] = [row.start for row in rows]
        numbers[2] = [row.count for row in rows]
        numbers[3] = [row.samples for row in rows]
        lanes, starts, counts, samples = numbers
        ends = starts + counts
        self._check_rows(plan, lanes, counts, ends, samples)
        bounds = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=bounds[1:])
        num_tokens = int(bounds[-1])
        if num_tokens != plan.num_tokens:
            raise RuntimeError(f"plan {plan.step}: {num_tokens} tokens, not {plan.num_tokens}")
        self._write_tokens(lanes, starts - bounds[:-1], counts, num_tokens)
        scored = self._scored(plan, held)
        drawing = samples.nonzero()[0]
        num_logits = self._write_logits_index(bounds, drawing, starts, scored)
        unread = UNREAD_TOKEN in self._token_ids.array[:num_tokens]
        sampled = lanes[drawing]
        self._sampled.array[: len(sampled)] = sampled
        if at_least:
            self._write_padding(len(rows), at_least)
            self._seqused_k.array[: len(rows)] = ends
            self._block_table.array[: len(rows)] = self._table.blocks[lanes]
            return self._padded(at_least, sampled.tolist())
        meta = self._write_sequences(plan, lanes, bounds, ends, num_logits)
        batch = Batch(self._token_ids.publish(num_tokens), meta.positions, meta.logits_index)
        token_lanes = self._token_lanes.publish(num_tokens if unread else 0)
        return StepInputs(
            batch,
            meta,
            sampled.tolist(),
            scored,
            self._sampled.publish(len(sampled)),
            token_lanes,
            unread,
        )

    def blank(self, rows: int) -> StepInputs:
        """A step of nothing but padding: what a graph for so many decodes is captured with."""
        self._write_padding(0, rows)
        return self._padded(rows, [])

    def _write_padding(self, first: int, rows: int) -> None:
        """Rows [first, rows) read one token of the null block and write nothing."""
        pad = slice(first, rows)
        self._cu_seqlens_q.array[: rows + 1] = np.arange(rows + 1)
        self._logits_index.array[:rows] = np.arange(rows)
        self._seqused_k.array[pad] = 1
        self._block_table.array[pad] = NULL_BLOCK
        self._slot_mapping.array[pad] = NO_SLOT
        for buffer in (self._positions, self._token_ids, self._token_lanes):
            buffer.array[pad] = 0

    def _padded(self, rows: int, lanes: list[int]) -> StepInputs:
        """Publish a step of `rows` decodes. Whoever captures it finds later ones in its place, so
        its largest key count is the largest there can be."""
        table = self._block_table
        width = blocks_for(self._table.max_model_len, self._table.block_size)
        meta = StepMeta(
            num_seqs=rows,
            num_tokens=rows,
            num_decodes=rows,
            max_q=1,
            max_k=self._table.max_model_len,
            cu_seqlens_q=self._cu_seqlens_q.publish(rows + 1),
            seqused_k=self._seqused_k.publish(rows),
            block_table=table.publish(rows, width),
            slot_mapping=self._slot_mapping.publish(rows),
            positions=self._positions.publish(rows),
            logits_index=self._logits_index.publish(rows),
        )
        batch = Batch(self._token_ids.publish(rows), meta.positions, meta.logits_index)
        return StepInputs(
            batch,
            meta,
            lanes,
            [],
            self._sampled.publish(len(lanes)),
            self._token_lanes.publish(rows),
            unread=True,
            padded=True,
        )

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

    def _write_logits_index(
        self,
        bounds: np.ndarray,
        drawing: np.ndarray,
        starts: np.ndarray,
        scored: list[ScoredPrompt],
    ) -> int:
        """Where the logits come from, and how many there are. drawing: the rows that sample."""
        index = self._logits_index.array
        at = len(drawing)
        index[:at] = bounds[drawing + 1] - 1
        for prompt in scored:
            begin = int(bounds[prompt.row]) + prompt.first - 1 - int(starts[prompt.row])
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
            raise RuntimeError(
                f"plan {plan.step}: at most {limits.max_num_batched_tokens} tokens per step, "
                f"got {plan.num_tokens}"
            )

    def _grant(self, row: Row) -> int:
        if row.new_blocks:
            low, high = min(row.new_blocks), max(row.new_blocks)
            if low < 1 or high > self._limits.num_blocks:
                raise RuntimeError(
                    f"sequence {row.seq_id}: blocks must be in [1, {self._limits.num_blocks}], "
                    f"got {low} to {high}"
                )
        return self._table.grant(row.seq_id, row.new_blocks)

    def _check_rows(
        self,
        plan: StepPlan,
        lanes: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        samples: np.ndarray,
    ) -> None:
        table = self._table
        covered = table.num_blocks[lanes] * table.block_size
        lengths = table.lengths[lanes]
        wrong = (counts < 1) | (ends - counts < 0) | (ends > lengths) | (ends > covered)
        wrong |= samples != ((ends == lengths) & ~table.ended[lanes])
        if True in wrong:
            at = int(wrong.argmax())
            raise RuntimeError(
                f"sequence {plan.rows[at].seq_id}: start {plan.rows[at].start}, count "
                f"{plan.rows[at].count}, samples {plan.rows[at].samples} do not fit "
                f"{lengths[at]} tokens and blocks for {covered[at]}"
            )
        decodes = plan.num_decodes
        leading = counts[: max(0, decodes)].tolist()
        if len(leading) != decodes or leading.count(1) != decodes:
            raise RuntimeError(
                f"plan {plan.step}: num_decodes {decodes}, but the leading rows have counts "
                f"{leading}"
            )

    # -- layout --------------------------------------------------------------------------------

    def _write_tokens(
        self, lanes: np.ndarray, offsets: np.ndarray, counts: np.ndarray, num_tokens: int
    ) -> None:
        """Per token: id, position, slot. offsets: a row's position minus its token index."""
        table = self._table
        lane_of_token, positions = lanes, np.arange(num_tokens)
        if num_tokens > len(lanes):
            lane_of_token, offsets = np.repeat(lanes, counts), np.repeat(offsets, counts)
        positions = positions + offsets
        self._token_lanes.array[:num_tokens] = lane_of_token
        self._token_ids.array[:num_tokens] = table.token_ids[lane_of_token, positions]
        self._positions.array[:num_tokens] = positions
        pages, within = np.divmod(positions, table.block_size)
        slots = table.blocks[lane_of_token, pages] * np.int64(table.block_size) + within
        self._slot_mapping.array[:num_tokens] = slots

    def _write_sequences(
        self,
        plan: StepPlan,
        lanes: np.ndarray,
        bounds: np.ndarray,
        ends: np.ndarray,
        num_logits: int,
    ) -> StepMeta:
        num_seqs, max_k = len(lanes), max(ends.tolist())
        width = blocks_for(max_k, self._table.block_size)
        num_tokens = int(bounds[-1])
        self._cu_seqlens_q.array[: num_seqs + 1] = bounds
        self._seqused_k.array[:num_seqs] = ends
        self._block_table.array[:num_seqs, :width] = self._table.blocks[lanes, :width]
        return StepMeta(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=plan.num_decodes,
            max_q=max(row.count for row in plan.rows),
            max_k=max_k,
            cu_seqlens_q=self._cu_seqlens_q.publish(num_seqs + 1),
            seqused_k=self._seqused_k.publish(num_seqs),
            block_table=self._block_table.publish(num_seqs, width),
            slot_mapping=self._slot_mapping.publish(num_tokens),
            positions=self._positions.publish(num_tokens),
            logits_index=self._logits_index.publish(num_logits),
        )
