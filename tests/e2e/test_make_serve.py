"""What a newcomer does: `make serve`, then `headway generate` in a second terminal, then Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.client import AsyncClient, Delta, Message, Sampling
from tests.e2e.app import App, headway

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(420)]
QUESTION = "Name the capital of France."
"""Answered with a margin. Asked with "What is ...?", the model has two first tokens whose bfloat16
logits are equal, and the kernels of a processor decide.
"""


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    command = ["make", "-C", str(ROOT), "serve", "ARGS=--address {address}"]
    app = App(command).start()
    yield app
    app.stop()
    assert any("stopped" in line for line in app.lines), app.lines
    assert app.survivors() == []


def command(app: App, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        headway(args[0], "--address", app.address, *args[1:]),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_it_says_what_happens_and_what_to_type_next(app: App):
    told = "\n".join(app.lines)
    assert f"ready: SmolLM2-135M-Instruct on {app.address}" in told
    assert f'headway generate --address {app.address} "' in told
    assert "Ctrl-C stops everything" in told


def test_generate_streams_sensible_text(app: App):
    done = command(app, "generate", QUESTION, "--temperature", "0", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr == ""


def test_generate_prints_events_as_json(app: App):
    prompt = "Count from one to one hundred."
    done = command(app, "generate", prompt, "--json", "--temperature", "0", "--max-tokens", "8")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    ids = [i for event in events[1:-1] for i in event["token_ids"]]
    assert events[-1]["completion_tokens"] == len(ids) == 8
    assert events[-1]["reason"] == "length"


def test_status_shows_the_engine(app: App):
    done = command(app, "status", "--json")
    status = json.loads(done.stdout)
    (engine,) = status["engines"]
    assert engine["connected"] is True
    assert engine["blocks_free"] == engine["blocks_total"] > 0
    table = command(app, "status")
    assert engine["engine_id"] in table.stdout
    assert "SmolLM2-135M-Instruct" in table.stdout


def test_a_cancelled_stream_is_free_within_two_steps(app: App):
    async def scenario() -> None:
        async with AsyncClient(app.address) as client:
            events = client.generate(
                [Message("user", "Tell a long story.")], Sampling(max_tokens=500, ignore_eos=True)
            )
            deltas = 0
            async for event in events:
                deltas += isinstance(event, Delta)
                if deltas == 5:
                    break
            (before,) = (await client.status()).engines
            assert before.running == 1
            await events.aclose()
            deadline = time.monotonic() + 10
            while True:
                (after,) = (await client.status()).engines
                if after.running == 0 and after.blocks_free == after.blocks_total:
                    break
                assert time.monotonic() < deadline, after
                await asyncio.sleep(0.01)
            # The step under way when the status was asked, the one under way at the cancel, two.
            assert after.step - before.step <= 4

    asyncio.run(scenario())


def test_bad_input_is_one_clear_line(app: App):
    done = command(app, "generate", QUESTION, "--temperature", "-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "temperature" in done.stderr
    assert "-1" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_taken_port_is_named_before_anything_starts(app: App):
    begun = time.monotonic()
    done = subprocess.run(
        headway("serve", "--address", app.address),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot listen on {app.address}" in done.stderr
    assert "--address" in done.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "/nonexistent/folder"), "/nonexistent/folder"),
        (("--engines", "0"), "engines must be at least 1, got 0"),
        (("--max-num-batched-tokens", "0"), "max_num_batched_tokens must be at least 1, got 0"),
        (("--watermark", "1.5"), "watermark must be in [0, 1), got 1.5"),
        (("--address", "nowhere"), "address must be host:port, got 'nowhere'"),
        (("--max-model-len", "100000"), "max_model_len must be at most 8192"),
        (("--attention-backend", "nope"), "nope"),
        (("--api-keys-file", "/nonexistent/keys"), "/nonexistent/keys"),
        (("--policy", "static", "--budget", "itl"), "'itl'"),
        (("--address", ":50051"), "host"),
    ],
)
def test_impossible_configuration_is_refused_before_anything_starts(args, message):
    done = subprocess.run(
        headway("serve", "--address", "127.0.0.1:0", *args),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting Ray" not in done.stdout


def test_what_a_file_or_a_variable_says_is_refused_with_where_it_says_so(tmp_path):
    path = tmp_path / "headway.toml"
    path.write_text("[engine]\nmax_num_seqs = 0\nblock_sise = 16\n")
    done = subprocess.run(
        headway("serve", "--config", str(path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HEADWAY_FLEET_ROUTERS": "none"},
    )
    assert done.returncode == 2
    assert f"max_num_seqs must be at least 1, got 0 (from {path} [engine])" in done.stderr
    assert "no key 'block_sise'; did you mean block_size?" in done.stderr
    assert "got 'none' (from HEADWAY_FLEET_ROUTERS)" in done.stderr
