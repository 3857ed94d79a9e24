"""`headway config check` over a real model folder, with nothing started."""

from __future__ import annotations

import json
import socket

import pytest

from cluster.cli import main
from cluster.config.check import check
from cluster.config.load import load_settings
from cluster.findings import Level
from tests.e2e.tiny_folder import write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("HEADWAY_CONFIG", raising=False)


def flags(folder, *more: str) -> list[str]:
    return ["--model", str(folder), "--device", "cpu", "--address", "127.0.0.1:0", *more]


def run(capsys, *args: str) -> tuple[int, str]:
    code = main(["config", "check", *args])
    out, err = capsys.readouterr()
    return code, out + err


def test_every_value_is_explained_with_its_source(capsys, folder, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[engine]\nblock_size = 8\nnum_blocks = 100\n")
    code, out = run(capsys, *flags(folder, "--config", str(path)))
    assert code == 0, out
    assert any(
        line.split() == f"block_size = 8 [{path} [engine]] KV positions per block".split()
        for line in out.splitlines()
    )
    assert "[--model] Hugging Face folder" in out
    assert "100 blocks of 8 tokens" in out
    assert out.rstrip().endswith("this can work")


def test_json_has_values_findings_and_numbers(capsys, folder, monkeypatch):
    monkeypatch.setenv("HEADWAY_FLEET_HOP_SECRET", "hush-hush-hush-hush")
    code, out = run(capsys, *flags(folder, "--num-blocks", "100", "--json"))
    report = json.loads(out)
    assert code == 0
    assert report["possible"] is True
    assert report["values"]["engine.num_blocks"]["value"] == 100
    assert report["values"]["engine.num_blocks"]["source"] == "--num-blocks"
    assert report["values"]["fleet.hop_secret"]["value"] == "(hidden)"
    assert "hush" not in out
    numbers = report["footprint"]
    assert numbers["kv_tokens"] == 1600
    assert numbers["kv_bytes"] == 101 * numbers["block_bytes"]
    assert numbers["longest_sequence"] == 512


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--num-blocks", "4"), "num_blocks 4 of block_size 16 hold 64 tokens"),
        (("--num-blocks", "100000000000"), "num_blocks 100000000000 needs"),
        (("--max-model-len", "100000"), "max_model_len must be at most 512"),
        (("--attention-backend", "nope"), "nope"),
        (("--budget", "itl", "--policy", "static"), "budget from --budget"),
        (("--api-keys-file", "/nonexistent/keys"), "/nonexistent/keys"),
        (("--tls-key", "/k"), "tls_certificate and tls_key go together"),
        (("--model", "/nonexistent/folder"), "/nonexistent/folder"),
        (("--engines", "100000", "--num-blocks", "50"), "memory"),
        (("--collectives", "nccl", "--tensor-parallel-size", "2"), "nccl"),
        (("--cores", "9999"), "cores must be"),
    ],
)
def test_the_impossible_is_refused(capsys, folder, more, message):
    code, out = run(capsys, *flags(folder, *more))
    assert code == 2
    assert message in out
    assert "this cannot work" in out
    assert "Traceback" not in out


def test_what_cannot_be_read_is_refused_at_once(capsys, folder):
    code, out = run(capsys, "--block-size", "many")
    assert code == 2
    assert "block_size must be an integer at least 1, got 'many' (from --block-size)" in out


def test_a_taken_port_is_a_problem_and_an_open_door_a_warning(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"model.path": str(folder), "engine.device": "cpu"}
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        report = check(load_settings(None, {**given, "front_door.address": address}, {}))
        assert not report.possible
        assert any(f.subject == "front door" and address in f.message for f in report.findings)
        assert report.footprint is not None, "the rest is still judged"
    report = check(load_settings(None, {**given, "front_door.address": "0.0.0.0:0"}, {}))
    (open_door,) = (f for f in report.findings if f.level is Level.WARNING)
    assert "admits everybody" in open_door.message


def test_nothing_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    report = check(load_settings(None, {"engine.device": "cpu"}, {}))
    assert report.footprint is None
    assert any("headway pull" in f.advice for f in report.findings)
    assert list(tmp_path.iterdir()) == []
