"""`headway simulate` and `headway plan` as a person would run them."""

from __future__ import annotations

import argparse
import json
import re
from xml.etree import ElementTree

import pytest

from cluster import cli
from cluster.commands import plan, simulate
from cluster.core.errors import ConfigError


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for command in (simulate, plan):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    return int(args.run(args))


def test_a_table(capsys):
    assert run("simulate", "--requests", "50") == 0
    printed = capsys.readouterr().out
    for label in ("tokens/s", "TTFT P99 ms", "longest gap ms", "goodput req/s", "recompute %"):
        assert label in printed


def test_json(capsys):
    assert run("simulate", "--requests", "50", "--engines", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["requests"] == 50
    assert found["configuration"]["engines"] == "2"


def test_the_articles_json(capsys):
    assert run("simulate", "--article", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["policies"]) == {"static", "dynamic", "continuous", "chunked", "orca"}
    assert found["policies"]["chunked"]["tok_s"] == pytest.approx(889.274, rel=1e-3)


def test_the_articles_table(capsys):
    assert run("simulate", "--article") == 0
    assert "889.274" in capsys.readouterr().out


def test_html_stands_alone_and_is_well_formed(tmp_path, capsys):
    report = tmp_path / "report.html"
    argv = ("--requests", "60", "--policy", "continuous", "--html", str(report))
    assert run("simulate", *argv) == 0
    text = report.read_text()
    assert "http" not in text.replace("http-equiv", "")
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 4
    for plot in plots:
        ElementTree.fromstring(plot)
    for colour in ("#3b82c4", "#d9534f"):
        assert text.count(f'fill="{colour}"') > 10


def test_a_sweep(tmp_path, capsys):
    report = tmp_path / "sweep.html"
    argv = ("--requests", "60", "--sweep", "budget=64,512", "--json", "--html", str(report))
    assert run("simulate", *argv) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["value"] for row in rows] == [64, 512]
    assert rows[0]["itl_p99_ms"] < rows[1]["itl_p99_ms"]
    assert "budget 64" in report.read_text()


@pytest.mark.parametrize("sweep", ["policy=static,chunked", "engines=1,2", "rate=2,8"])
def test_other_sweeps(sweep, capsys):
    assert run("simulate", "--requests", "30", "--max-num-seqs", "8", "--sweep", sweep) == 0


def test_profiled_costs(capsys):
    argv = ("--requests", "30", "--cost", "profiled", "--model", "7b", "--tensor-parallel", "2")
    assert run("simulate", *argv, "--json") == 0
    assert json.loads(capsys.readouterr().out)["summary"]["requests"] == 30


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous", "fused", "chunked"])
def test_the_books_add_up_after_every_step(policy, capsys):
    argv = ("--requests", "30", "--policy", policy, "--kv-tokens", "8000", "--max-num-seqs", "8")
    assert run("simulate", *argv, "--rate", "30", "--check") == 0


def test_prefix_cache_and_swap_on_a_trace_with_shared_prefixes(capsys):
    argv = ("simulate", "--workload", "mooncake", "--spread", "--requests", "40", "--json")
    swap = ("--preemption", "swap", "--host-blocks", "2000", "--kv-tokens", "60000")
    found = {}
    for options in ((), ("--prefix-cache", "on"), swap):
        assert run(*argv, *options) == 0
        found[options] = json.loads(capsys.readouterr().out)["summary"]
    assert found[()]["prefix_hit_percent"] == 0
    assert found["--prefix-cache", "on"]["prefix_hit_percent"] > 1
    assert found["--prefix-cache", "on"]["ttft_p50_ms"] < found[()]["ttft_p50_ms"]
    assert found[swap]["requests"] + found[swap]["refused"] == 40


def test_a_learned_budget_holds_its_objective(capsys):
    argv = ("simulate", "--requests", "400", "--rate", "10", "--budget", "itl", "--json")
    assert run(*argv, "--itl-objective", "20", "--slow-down", "1.43@20s") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["itl_p99_ms"] < 20 * 1.05


def test_skipped_rows_are_counted(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    good = json.dumps({"timestamp": 0, "input_length": 9, "output_length": 2})
    trace.write_text(f"{good}\nnonsense\n{good}\n")
    argv = ("simulate", "--workload", str(trace), "--json")
    with pytest.raises(ConfigError, match="line 2"):
        run(*argv)
    assert run(*argv, "--skip-malformed") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["requests"] == 2
    assert len(found["skipped"]) == 1


def test_plan(capsys):
    argv = ("plan", "--requests", "150", "--rate", "20", "--slo", "ttft=1s,itl=25ms", "--json")
    assert run(*argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reached"]
    assert found["best"]["engines"] == 1
    assert 256 <= found["best"]["budget"] <= 768
    assert len(found["candidates"]) > 8


def test_plan_that_cannot_be_kept(capsys):
    argv = ("plan", "--requests", "60", "--slo", "ttft=1us", "--max-engines", "1")
    assert run(*argv) == 1
    assert "not reached with 1 engines" in capsys.readouterr().out


BAD = [
    (("--budget", "0"), "max_num_batched_tokens must be at least 1"),
    (("--budget", "8", "--policy", "continuous"), r"at least block_size \(16\)"),
    (("--kv-tokens", "100"), "none of the 20 requests fits: .* sequences of 96 tokens"),
    (("--kv-tokens", "-5"), "kv_tokens must hold a block"),
    (("--policy", "magic"), "unknown batching policy 'magic'"),
    (("--queue", "lifo"), "unknown queue 'lifo'"),
    (("--victims", "me"), "unknown victim policy 'me'"),
    (("--reservation", "none"), "unknown reservation 'none'"),
    (("--preemption", "swap"), "host_blocks must be at least 1"),
    (("--budget", "itl", "--policy", "static"), "cannot hold an objective"),
    (("--budget", "some"), "--budget takes"),
    (("--itl-objective", "nan", "--budget", "itl"), "itl_objective_s must be"),
    (("--rate", "nan"), "rate must be between"),
    (("--rate", "-1"), "rate must be between"),
    (("--requests", "0"), "requests must be between"),
    (("--prompt", "nan"), "mean length must be between"),
    (("--watermark", "nan"), "watermark must be in"),
    (("--engines", "0"), "engines must be between 1"),
    (("--engines", "100000"), "engines must be between 1"),
    (("--kv-tokens", "999999999999"), "books of"),
    (("--hardware", "tpu"), "unknown hardware 'tpu'"),
    (("--model", "405b"), "405b has .* GB of weights"),
    (("--tensor-parallel", "3"), "must divide the 32 heads"),
    (("--workload", "nowhere"), "no trace 'nowhere'"),
    (("--workload", "azure-conv", "--rate-scale", "nan"), "rate_scale must be above 0"),
    (("--slo", "ttft=-1s"), "not a time above 0"),
    (("--max-queue-delay", "nan", "--policy", "dynamic"), "max_queue_delay_s must be"),
    (("--slow-down", "2"), "not a time"),
    (("--slow-down", "nan@1s"), "FACTOR@TIME"),
    (("--cost", "nowhere.csv"), "no table"),
    (("--cost", "profiled"), "was measured with --model llama-2-7b"),
    (("--sweep", "budget"), "--sweep takes"),
    (("--sweep", "mood=1"), "--sweep takes"),
    (("--sweep", "budget=1,x"), "'x' is not a value"),
    (("--sweep", "budget=512,0"), "at least 1, got 0"),
    (("--html", "/nowhere/at/all.html"), "--html"),
    (("--article", "--html", "x.html"), "--html goes with"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input(argv, message):
    with pytest.raises(ConfigError, match=message):
        run("simulate", "--requests", "20", *argv)


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["simulate", "--budget", "0"]) == 2
    assert cli.main(["plan", "--share", "101"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 2
    assert captured.err.startswith("headway: max_num_batched_tokens must be at least 1, got 0")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--max-engines", "0"), "max_engines must be at least 1"),
        (("--share", "nan"), "share must be above 0"),
        (("--share", "0"), "share must be above 0"),
    ],
)
def test_bad_plans(argv, message):
    with pytest.raises(ConfigError, match=message):
        run("plan", "--requests", "20", *argv)
