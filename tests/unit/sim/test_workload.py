"""Synthetic arrivals and traces, good and bad."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from cluster.core.errors import ConfigError
from cluster.sim.engine import engine_request
from cluster.sim.traces import SHIPPED, TraceOptions, find_trace, read_trace
from cluster.sim.workload import Lengths, SimRequest, Synthetic, article_workload, mulberry32

BASE = Synthetic(4000, 5.0, Lengths(1000), Lengths(100), seed=3)


def gaps(workload) -> list[float]:
    times = [0.0, *(r.arrival_s for r in workload)]
    return [b - a for a, b in pairwise(times)]


def test_mulberry32_stays_in_range_and_repeats():
    draws = list(islice(iter(mulberry32(7), None), 1000))
    again = mulberry32(7)
    assert draws == [again() for _ in draws]
    assert all(0.0 <= d < 1.0 for d in draws)
    assert statistics.fmean(draws) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_arrival_processes(burstiness):
    found = gaps(replace(BASE, burstiness=burstiness))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.15)
    assert statistics.pstdev(found) / mean == pytest.approx(burstiness, rel=0.15, abs=1e-9)


def test_lengths_keep_their_mean_and_spread():
    prompts = [r.input_length for r in BASE]
    assert statistics.fmean(prompts) == pytest.approx(1000, rel=0.05)
    assert statistics.pstdev(prompts) / statistics.fmean(prompts) == pytest.approx(0.6, rel=0.1)
    assert min(prompts) >= 1
    fixed = replace(BASE, prompt=Lengths(64, 0.0))
    assert {r.input_length for r in fixed} == {64}


def test_the_same_seed_gives_the_same_requests():
    assert list(BASE) == list(BASE)
    assert list(article_workload(1)) != list(article_workload(2))


@pytest.mark.parametrize(
    "change",
    [
        {"rate": float("nan")},
        {"rate": 0.0},
        {"rate": -1.0},
        {"requests": 0},
        {"burstiness": float("inf")},
    ],
)
def test_bad_numbers(change):
    with pytest.raises(ConfigError, match=f"{next(iter(change))} must be between"):
        replace(BASE, **change)


def test_bad_lengths():
    with pytest.raises(ConfigError, match="mean length"):
        Lengths(float("nan"))
    with pytest.raises(ConfigError, match="length cv"):
        Lengths(10, -1)


# -- traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "mean_input"),
    [("azure-conv", 19_366, 1155), ("azure-code", 8_819, 2048), ("mooncake", 1_500, None)],
)
def test_shipped_traces(name, rows, mean_input):
    trace = read_trace(SHIPPED[name])
    assert len(trace.requests) == rows
    assert trace.requests[0].arrival_s == 0.0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace.requests))
    if mean_input is not None:
        mean = statistics.fmean(r.input_length for r in trace)
        assert mean == pytest.approx(mean_input, rel=0.01)


def jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


GOOD = {"timestamp": 1000, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]}


def test_jsonl(tmp_path):
    later = {**GOOD, "timestamp": 3500}
    del later["hash_ids"]
    trace = read_trace(jsonl(tmp_path / "t.jsonl", later, "", GOOD))
    assert trace.requests == [SimRequest(0.0, 10, 5, (1, 2)), SimRequest(2.5, 10, 5)]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp"),
        ({**GOOD, "timestamp": "soon"}, "timestamp"),
        ({**GOOD, "input_length": 0}, "input_length"),
        ({**GOOD, "input_length": 1.5}, "input_length"),
        ({**GOOD, "output_length": None}, "output_length"),
        ({**GOOD, "output_length": True}, "output_length"),
        ({**GOOD, "hash_ids": 3}, "hash_ids"),
        ({**GOOD, "hash_ids": ["a"]}, "hash_ids"),
        ("{", "(row)"),
        ("[" * 100_000, "(row)"),
        ("[]", "(row)"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, row, column):
    path = jsonl(tmp_path / "t.jsonl", GOOD, row, GOOD)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert f"t.jsonl line 2, column {column!r}" in str(error.value)
    trace = read_trace(path, TraceOptions(skip_malformed=True))
    assert len(trace.requests) == 2
    assert len(trace.skipped) == 1
    assert "line 2" in trace.skipped[0]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("yesterday,1,1", "TIMESTAMP"),
        ("2023-11-16 18:15:46.68x,1,1", "TIMESTAMP"),
        ("2023-11-16 18:15:46.5,many,1", "ContextTokens"),
        ("2023-11-16 18:15:46.5,1,-4", "GeneratedTokens"),
        ("2023-11-16 18:15:46.5,1", "GeneratedTokens"),
    ],
)
def test_a_bad_csv_row(tmp_path, row, column):
    path = tmp_path / "t.csv"
    path.write_text(f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44\n{row}\n")
    with pytest.raises(ConfigError, match=f"line 3, column '{column}'"):
        read_trace(path)


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="azure-conv, azure-code, mooncake"):
        find_trace("nowhere")
    header = tmp_path / "h.csv"
    header.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(ConfigError, match="column 'GeneratedTokens' is missing"):
        read_trace(header)
    empty = jsonl(tmp_path / "e.jsonl")
    with pytest.raises(ConfigError, match="no usable row"):
        read_trace(empty)
    other = tmp_path / "t.parquet"
    other.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"ends in \.csv or \.jsonl"):
        read_trace(other)
    for name, content in (("a.jsonl.gz", b"no gzip"), ("b.jsonl", b"\xff\xfe\x00")):
        broken = tmp_path / name
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(broken)
    cut = tmp_path / "c.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(cut)


def test_scales_caps_and_limit(tmp_path):
    rows = [{**GOOD, "timestamp": 1000 * i, "input_length": 100 * i} for i in range(1, 5)]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    options = TraceOptions(rate_scale=2.0, length_scale=0.5, max_input=120, max_output=2, limit=3)
    assert read_trace(path, options).requests == [
        SimRequest(0.0, 50, 2),
        SimRequest(0.5, 100, 2),
        SimRequest(1.0, 120, 2),
    ]


def test_ties_are_spread_over_the_tick(tmp_path):
    rows = [{**GOOD, "timestamp": t} for t in (0, 0, 0, 3000, 3000)]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    spread = read_trace(path, TraceOptions(spread=True))
    assert [r.arrival_s for r in spread] == [0.0, 1.0, 2.0, 3.0, 4.5]


@pytest.mark.parametrize(
    "change", [{"rate_scale": 0.0}, {"length_scale": float("nan")}, {"limit": 0}]
)
def test_bad_options(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        TraceOptions(**change)


def test_prompts_share_what_their_hashes_share_and_no_more():
    one = engine_request(1, SimRequest(0.0, 1200, 1, (7, 8, 9))).prompt_ids
    two = engine_request(2, SimRequest(0.0, 1100, 1, (7, 8, 10))).prompt_ids
    assert one[:1024] == two[:1024]
    assert one[1024] != two[1024]
    plain = engine_request(3, SimRequest(0.0, 50, 1)).prompt_ids
    assert len(plain) == 50
    assert plain[0] != engine_request(4, SimRequest(0.0, 50, 1)).prompt_ids[0]
