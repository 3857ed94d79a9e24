"""What overlapped steps and graphs stand on: buffers, padded inputs, ids on their way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from workers.attention.meta import StagedBuffer
from workers.feed import TokenFeed
from workers.graphs import graph_sizes
from workers.inputs import InputBuilder, InputLimits
from workers.sequences import UNREAD_TOKEN, SequenceTable

CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_tokens=9)


def held(*lengths: int) -> tuple[SequenceTable, InputBuilder, TokenFeed]:
    """Sequences 1, 2, ... of so many tokens, all with blocks."""
    table = SequenceTable(4, 16, 4, 100)
    for seq_id, length in enumerate(lengths, 1):
        table.admit(NewSequence(seq_id, list(range(length)), length, SAMPLING))
        table.grant(seq_id, [2 * seq_id - 1, 2 * seq_id])
    return table, InputBuilder(table, InputLimits(4, 32, 20), CPU), TokenFeed(4, CPU)


def decodes(table: SequenceTable, *seq_ids: int) -> StepPlan:
    rows = [Row(s, int(table.lengths[table.grant(s, [])]) - 1, 1, True, []) for s in seq_ids]
    return StepPlan(1, rows, num_decodes=len(rows), num_tokens=len(rows))


def test_the_host_side_of_one_step_is_not_that_of_the_next():
    """A device that only records shapes: its copies are not done when publish() returns."""
    buffer = StagedBuffer((4,), torch.device("meta"))
    first = buffer.array
    first[:] = 7
    buffer.publish(4)
    buffer.take_turn()
    second = buffer.array
    second[:] = 9
    assert first.tolist() == [7] * 4
    buffer.take_turn()
    assert buffer.array is first


def test_on_the_cpu_nothing_is_copied():
    buffer = StagedBuffer((2, 3), CPU)
    buffer.array[:] = 5
    view = buffer.publish(2, 2)
    assert view.tolist() == [[5, 5]] * 2
    assert view.data_ptr() == buffer.array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_graph_sizes(most, expected):
    assert graph_sizes(most) == expected


def test_unknown_ids_come_from_what_was_sampled_for_the_lane():
    table, inputs, feed = held(3, 5)
    step = inputs.build(decodes(table, 1, 2))
    assert not step.unread
    feed.take(step, torch.tensor([41, 42]))
    expected = [table.expect(lane) for lane in step.lanes]
    step = inputs.build(decodes(table, 2, 1))
    assert step.unread
    assert step.batch.token_ids.tolist() == [UNREAD_TOKEN] * 2
    assert feed.fill(step).token_ids.tolist() == [42, 41]
    for place, token_id in zip(expected, (41, 42), strict=True):
        table.settle(place, token_id)
    step = inputs.build(decodes(table, 2, 1))
    assert not step.unread
    assert feed.fill(step).token_ids.tolist() == [42, 41]


def test_a_failed_draw_feeds_an_id_that_can_be_looked_up():
    table, inputs, feed = held(3)
    feed.take(inputs.build(decodes(table, 1)), torch.tensor([-1]))
    place = table.expect(0)
    step = inputs.build(decodes(table, 1))
    assert feed.fill(step).token_ids.tolist() == [0]
    table.settle(place, None)
    assert table.ended[place.lane]


def test_an_id_that_comes_late_does_not_reach_the_lanes_next_sequence():
    table, _, _ = held(3)
    lane = table.grant(1, [])
    place = table.expect(lane)
    table.release(1)
    table.admit(NewSequence(9, [5, 6, 7, 8, 9], 5, SAMPLING))
    assert table.grant(9, []) == lane
    table.settle(place, 77)
    table.settle(place, None)
    assert table.token_ids[lane, :5].tolist() == [5, 6, 7, 8, 9]
    assert not table.ended[lane]


def test_padding_reads_the_null_block_and_writes_nowhere():
    table, inputs, _ = held(3, 5, 9)
    table.grant(3, [7])
    # Leaves numbers of a real step where the padding will stand.
    inputs.build(decodes(table, 1, 2, 3))
    step = inputs.build(decodes(table, 3), at_least=4)
    meta = step.meta
    assert (meta.num_seqs, meta.num_tokens, meta.num_decodes, meta.max_q) == (4, 4, 4, 1)
    assert meta.slot_mapping.tolist() == [7 * 4, -1, -1, -1]
    assert meta.seqused_k.tolist() == [9, 1, 1, 1]
    assert meta.block_table[1:].unique().tolist() == [0]
    assert meta.block_table[0].tolist() == [5, 6, 7, 0]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert step.batch.logits_index.tolist() == [0, 1, 2, 3]
    assert step.batch.positions.tolist() == [8, 0, 0, 0]
    assert step.sampled.tolist() == step.lanes
    assert len(step.lanes) == 1


def test_a_padded_step_lies_where_the_one_before_lay():
    """A graph reads every later step in the place of its own."""
    table, inputs, _ = held(3, 5)
    blank = inputs.blank(4)
    real = inputs.build(decodes(table, 1, 2), at_least=4)
    for name in ("cu_seqlens_q", "seqused_k", "block_table", "slot_mapping", "positions"):
        before, after = getattr(blank.meta, name), getattr(real.meta, name)
        assert before.data_ptr() == after.data_ptr()
        assert before.shape == after.shape
        np.testing.assert_array_equal(before.numpy(), after.numpy())
    assert blank.batch.token_ids.data_ptr() == real.batch.token_ids.data_ptr()
    assert blank.token_lanes.data_ptr() == real.token_lanes.data_ptr()
    assert (blank.meta.max_k, blank.padded) == (real.meta.max_k, real.padded) == (16, True)


def test_graphs_are_chosen_by_name():
    with pytest.raises(ConfigError, match="decode_graphs must be one of auto, off, got 'always'"):
        WorkerConfig("m", decode_graphs="always")
