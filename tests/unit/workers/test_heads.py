"""How a model is cut for the ranks of a tensor-parallel group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.parallel.collectives import Shard
from workers.parallel.heads import Span, split, split_heads

sizes = st.integers(1, 17)


@given(kv_heads=st.integers(1, 40), group=st.integers(1, 12), size=sizes)
def test_every_query_head_is_on_one_rank_beside_its_kv_head(kv_heads, group, size):
    ranks = [split_heads(kv_heads * group, kv_heads, Shard(rank, size)) for rank in range(size)]
    assert len({(heads.query.size, heads.kv.size) for heads in ranks}) == 1
    held: list[int] = []
    for heads in ranks:
        assert heads.query.size % heads.kv.size == 0
        assert 0 <= heads.query.real <= heads.query.size
        assert 0 <= heads.kv.real <= heads.kv.size
        local_group = heads.query.size // heads.kv.size
        for slot, head in enumerate(range(heads.query.begin, heads.query.end)):
            assert heads.kv.begin + slot // local_group == head // group
            assert slot // local_group < heads.kv.real
            held.append(head)
    assert sorted(held) == list(range(kv_heads * group))


@given(kv_heads=st.integers(1, 40), group=st.integers(1, 12), size=sizes)
def test_kv_heads_are_on_several_ranks_only_where_there_are_too_few(kv_heads, group, size):
    ranks = [split_heads(kv_heads * group, kv_heads, Shard(rank, size)) for rank in range(size)]
    held = [head for heads in ranks for head in range(heads.kv.begin, heads.kv.end)]
    assert set(held) == set(range(kv_heads))
    if kv_heads >= size:
        assert len(held) == kv_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "local"),
    [
        (9, 3, 1, (9, 3)),
        (9, 3, 2, (6, 2)),
        (9, 3, 4, (3, 1)),
        (32, 8, 8, (4, 1)),
        (4, 1, 4, (1, 1)),
        (16, 2, 8, (2, 1)),
        (7, 7, 2, (4, 4)),
    ],
)
def test_heads_per_rank(heads, kv_heads, size, local):
    found = split_heads(heads, kv_heads, Shard(0, size))
    assert (found.query.size, found.kv.size) == local


@given(total=st.integers(1, 5000), size=sizes)
def test_dimensions_are_cut_without_gap_or_overlap(total, size):
    spans = [split(total, Shard(rank, size)) for rank in range(size)]
    assert [i for span in spans for i in range(span.begin, span.end)] == list(range(total))
    assert len({span.size for span in spans}) == 1
    assert size == 1 or spans[0].size % 16 == 0
    assert spans[0].size < -(-total // size) + 16


def test_one_rank_has_no_filling():
    assert split(70, Shard()) == Span(0, 70, 70)
