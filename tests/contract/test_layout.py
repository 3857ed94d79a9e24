"""Every StepLayout writes the same buffers: the compiled one what the reference in numpy does."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.plan import NewSequence
from cluster.core.sampling import SamplingParams
from workers.layout import (
    BUFFERS,
    LaidOut,
    NumpyLayout,
    RowFields,
    RowMisfit,
    StepBuffers,
    StepLayout,
    TooManyTokens,
)
from workers.native.layout import NativeLayout
from workers.sequences import SequenceTable

SEQS, LONGEST, BLOCK, TOKENS = 5, 40, 4, 60
LAYOUTS: list[Callable[[SequenceTable, StepBuffers], StepLayout]] = [NumpyLayout, NativeLayout]
UNTOUCHED = -7


def held(lengths: list[int], unread: list[bool]) -> SequenceTable:
    """Sequence n in lane n, its blocks in no order."""
    table = SequenceTable(SEQS, LONGEST, BLOCK, 1000)
    free = np.random.default_rng(0).permutation(np.arange(1, 1 + SEQS * LONGEST // BLOCK)).tolist()
    for number, length in enumerate(lengths):
        tokens = [(31 * number + i) % 1000 for i in range(length)]
        params = SamplingParams(max_tokens=LONGEST)
        table.admit(NewSequence(number, tokens, length, params))
        table.grant(number, [free.pop() for _ in range(LONGEST // BLOCK)])
        if unread[number]:
            table.expect(table.grant(number, []))
    return table


def buffers_of(table: SequenceTable) -> StepBuffers:
    buffers = StepBuffers(SEQS, TOKENS, table.blocks.shape[1], torch.device("cpu"))
    for name in BUFFERS:
        getattr(buffers, name).array[:] = UNTOUCHED
    return buffers


def fields(rows: list[tuple[int, int, int, bool]]) -> RowFields:
    return array("q", [int(value) for row in rows for value in row])


@st.composite
def steps(draw: st.DrawFn) -> tuple[SequenceTable, RowFields, int]:
    """Rows that fit, of sequences of which some wait for an id."""
    count = draw(st.integers(1, SEQS))
    lengths = draw(st.lists(st.integers(1, LONGEST - 1), min_size=count, max_size=count))
    unread = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    table = held(lengths, unread)
    rows, left = [], TOKENS
    for number in draw(st.permutations(range(count))):
        lane = table.grant(number, [])
        length = int(table.lengths[lane])
        start = draw(st.integers(0, length - 1))
        tokens = draw(st.integers(1, min(length - start, left - count)))
        left -= tokens
        rows.append((lane, start, tokens, start + tokens == length))
    return table, fields(rows), draw(st.sampled_from([0, 3, LONGEST // BLOCK]))


@given(steps())
def test_the_compiled_layout_writes_what_the_reference_writes(
    step: tuple[SequenceTable, RowFields, int],
):
    table, rows, pages = step
    results, written = [], []
    for layout in LAYOUTS:
        buffers = buffers_of(table)
        results.append(layout(table, buffers).write(rows, pages))
        written.append({name: getattr(buffers, name).array.copy() for name in BUFFERS})
    assert results[0] == results[1]
    for name in BUFFERS:
        np.testing.assert_array_equal(written[0][name], written[1][name], err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_a_chunk_and_an_id_that_is_still_to_come(
    layout: Callable[[SequenceTable, StepBuffers], StepLayout],
):
    table = held([6, 9], [True, False])
    lanes = [table.grant(number, []) for number in (0, 1)]
    buffers = buffers_of(table)
    rows = fields([(lanes[0], 6, 1, True), (lanes[1], 2, 4, False)])
    assert layout(table, buffers).write(rows, 0) == LaidOut(5, 1, 1, 4, 7, True)
    assert buffers.cu_seqlens_q.array[:3].tolist() == [0, 1, 5]
    assert buffers.seqused_k.array[:2].tolist() == [7, 6]
    assert buffers.positions.array[:5].tolist() == [6, 2, 3, 4, 5]
    assert buffers.token_ids.array[:5].tolist() == [-1, 33, 34, 35, 36]
    assert buffers.token_lanes.array[:5].tolist() == [lanes[0]] + [lanes[1]] * 4
    first, second = (table.blocks[lane].tolist() for lane in lanes)
    slots = [first[1] * BLOCK + 2, second[0] * BLOCK + 2, second[0] * BLOCK + 3]
    slots += [second[1] * BLOCK, second[1] * BLOCK + 1]
    assert buffers.slot_mapping.array[:5].tolist() == slots
    assert buffers.block_table.array[:2, :2].tolist() == [first[:2], second[:2]]
    assert buffers.logits_index.array[0] == 0
    assert buffers.sampled.array[0] == lanes[0]
    for name, used in (("positions", 5), ("logits_index", 1), ("sampled", 1), ("seqused_k", 2)):
        assert set(getattr(buffers, name).array[used:].tolist()) == {UNTOUCHED}, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "row",
    [
        (0, 8, 0, False),
        (0, -1, 2, False),
        (0, 0, 10, True),
        (0, 9, 1, True),
        (0, 8, 1, False),
        (0, 7, 1, True),
        (0, 2**62, 2**62, False),
        (0, -(2**63), 1, False),
        (1, 3, 1, True),
        (2, 8, 1, True),
    ],
    ids=[
        "no tokens",
        "before the first",
        "beyond the last, from the first",
        "beyond the last",
        "ends without a sample",
        "samples before the end",
        "far beyond",
        "far before",
        "has ended",
        "beyond its blocks",
    ],
)
def test_a_row_that_does_not_fit_is_named_and_nothing_is_written(
    layout: Callable[[SequenceTable, StepBuffers], StepLayout], row: tuple[int, int, int, bool]
):
    table = held([9, 4, 9, 5], [False] * 4)
    lanes = [table.grant(number, []) for number in range(4)]
    table.ended[lanes[1]] = True
    table.num_blocks[lanes[2]] = 2
    buffers = buffers_of(table)
    sound = (lanes[3], 4, 1, True)
    with pytest.raises(RowMisfit) as error:
        layout(table, buffers).write(fields([sound, (lanes[row[0]], *row[1:])]), 0)
    assert error.value.row == 1
    for name in BUFFERS:
        assert set(getattr(buffers, name).array.ravel().tolist()) == {UNTOUCHED}, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_than_the_buffers_hold_are_refused(
    layout: Callable[[SequenceTable, StepBuffers], StepLayout],
):
    table = held([39, 39], [False, False])
    lanes = [table.grant(number, []) for number in (0, 1)]
    buffers = buffers_of(table)
    with pytest.raises(TooManyTokens) as error:
        layout(table, buffers).write(fields([(lane, 0, 39, True) for lane in lanes]), 0)
    assert error.value.num_tokens == 78
    assert set(buffers.positions.array.tolist()) == {UNTOUCHED}
