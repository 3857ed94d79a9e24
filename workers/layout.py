"""A step's rows laid out in its buffers: the host's work on the way to the device.

The step before has swept the processor's caches, so that what counts here is how much code and
memory is touched, more than what is computed. NativeLayout (workers.native.layout) does in one
compiled call what NumpyLayout, the reference, does with some twenty of numpy's.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from cluster.core.config import blocks_for
from workers.attention.meta import StagedBuffer
from workers.sequences import UNREAD_TOKEN, SequenceTable

FIELDS = 4
"""Of a row in RowFields."""

RowFields: TypeAlias = "array[int]"
"""int64, FIELDS per row: lane, start, count, and whether it samples (0 or 1)."""


BUFFERS = (
    "cu_seqlens_q",
    "seqused_k",
    "block_table",
    "slot_mapping",
    "positions",
    "token_ids",
    "logits_index",
    "token_lanes",
    "sampled",
)
"""Those of StepBuffers, by name."""


class StepBuffers:
    """Where a step is written, allocated once; see StepMeta and StepInputs for what they hold."""

    def __init__(self, seqs: int, tokens: int, pages: int, device: torch.device) -> None:
        self.cu_seqlens_q = StagedBuffer((seqs + 1,), device)
        self.seqused_k = StagedBuffer((seqs,), device)
        self.block_table = StagedBuffer((seqs, pages), device)
        self.slot_mapping = StagedBuffer((tokens,), device)
        self.positions = StagedBuffer((tokens,), device)
        self.token_ids = StagedBuffer((tokens,), device)
        self.logits_index = StagedBuffer((seqs + tokens,), device)
        self.token_lanes = StagedBuffer((tokens,), device)
        self.sampled = StagedBuffer((seqs,), device)
        self._all: list[StagedBuffer] = [getattr(self, name) for name in BUFFERS]
        self._takes_turns = len(self.sampled.arrays) > 1

    @property
    def turn(self) -> int:
        """Which half of every buffer is written now."""
        return self.sampled.turn

    def take_turn(self) -> None:
        """Before a step is written."""
        if self._takes_turns:
            for buffer in self._all:
                buffer.take_turn()


class LaidOut(NamedTuple):
    """num_tokens: sum of the counts. num_decodes: leading rows of one token. num_sampled: rows that
    sample. max_q, max_k: largest query and key count. unread: see StepInputs."""

    num_tokens: int
    num_decodes: int
    num_sampled: int
    max_q: int
    max_k: int
    unread: bool


class RowMisfit(Exception):
    """A row does not fit its sequence."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class TooManyTokens(Exception):
    """The rows have more tokens than the buffers hold."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class StepLayout(Protocol):
    def write(self, fields: RowFields, all_pages: int) -> LaidOut:
        """Check the rows against their sequences and write all buffers; of the logits' index only
        the rows that sample. The lanes are of different sequences that are held.

        all_pages: how many columns of the block table are to be right; beyond, those of max_k are.

        Raises RowMisfit for the first row without tokens, one that begins before 0, goes beyond its
        sequence's tokens or blocks, or samples although it does not reach the last token (or the
        other way round); TooManyTokens. Nothing is written then.
        """


class NumpyLayout:
    def __init__(self, table: SequenceTable, buffers: StepBuffers) -> None:
        self._table = table
        self._buffers = buffers

    def write(self, fields: RowFields, all_pages: int) -> LaidOut:
        table, buffers = self._table, self._buffers
        rows = np.frombuffer(fields, dtype=np.int64).reshape(-1, FIELDS)
        lanes, starts, counts, samples = rows.T
        ends = starts + counts
        self._check(lanes, starts, counts, ends, samples)
        bounds = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=bounds[1:])
        num_tokens = int(bounds[-1])
        if num_tokens > len(buffers.token_ids.array):
            raise TooManyTokens(num_tokens)
        unread = self._write_tokens(lanes, starts - bounds[:-1], counts, num_tokens)
        drawing = samples.nonzero()[0]
        buffers.logits_index.array[: len(drawing)] = bounds[drawing + 1] - 1
        buffers.sampled.array[: len(drawing)] = lanes[drawing]
        max_k = int(ends.max())
        width = max(all_pages, blocks_for(max_k, table.block_size))
        buffers.cu_seqlens_q.array[: len(bounds)] = bounds
        buffers.seqused_k.array[: len(rows)] = ends
        buffers.block_table.array[: len(rows), :width] = table.blocks[lanes, :width]
        longer = (counts > 1).nonzero()[0]
        num_decodes = int(longer[0]) if len(longer) else len(rows)
        return LaidOut(num_tokens, num_decodes, len(drawing), int(counts.max()), max_k, unread)

    def _check(
        self,
        lanes: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        samples: np.ndarray,
    ) -> None:
        table = self._table
        lengths = table.lengths[lanes]
        # Compared so that no sum can overflow.
        wrong = (counts < 1) | (starts < 0) | (counts > lengths) | (starts > lengths - counts)
        wrong |= ends > table.num_blocks[lanes] * table.block_size
        wrong |= samples != ((ends == lengths) & ~table.ended[lanes])
        if wrong.any():
            raise RowMisfit(int(wrong.argmax()))

    def _write_tokens(
        self, lanes: np.ndarray, offsets: np.ndarray, counts: np.ndarray, num_tokens: int
    ) -> bool:
        """Per token: lane, id, position, slot. offsets: a row's position minus its token index.
        Returns whether ids are unread."""
        table, buffers = self._table, self._buffers
        lane_of_token = np.repeat(lanes, counts)
        positions = np.arange(num_tokens) + np.repeat(offsets, counts)
        token_ids = table.token_ids[lane_of_token, positions]
        pages, within = np.divmod(positions, table.block_size)
        slots = table.blocks[lane_of_token, pages] * np.int64(table.block_size) + within
        for buffer, values in (
            (buffers.token_lanes, lane_of_token),
            (buffers.token_ids, token_ids),
            (buffers.positions, positions),
            (buffers.slot_mapping, slots),
        ):
            buffer.array[:num_tokens] = values
        return bool((token_ids == UNREAD_TOKEN).any())
