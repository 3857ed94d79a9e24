"""The client against a real server: events, errors, cancels, keys, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from cluster.core.errors import Overloaded, SequenceFailed
from cluster.gateway.config import TlsFiles
from cluster.text.tokenizer import Tokenizer
from headway.client import (
    Accepted,
    AsyncClient,
    Client,
    ClientError,
    Connection,
    DeadlineExceeded,
    Delta,
    Finished,
    InvalidRequest,
    Message,
    RetryableError,
    Sampling,
    ServerError,
)
from headway.types import MAX_TIMEOUT_S
from tests.tcp import connections_to
from tests.wire.live import live_gateway
from tests.wire.wire_support import Script, eventually, gateway, in_loop, loopback

FEW = Sampling(max_tokens=4, seed=7)


def wait_for(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_blocking_client(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcd")
    with live_gateway(tokenizer, Script(ids)) as wire, Client(wire.address) as client:
        client.wait_ready(timeout_s=5)
        first, *deltas, last = client.generate("hello", FEW)
        assert isinstance(first, Accepted)
        assert first.seed == 7
        assert all(isinstance(delta, Delta) for delta in deltas)
        assert "".join(delta.text for delta in deltas) == "abcd"
        assert abs(deltas[-1].emit_time_s - time.time()) < 60
        assert isinstance(last, Finished)
        assert (last.reason, last.matched_stop, last.completion_tokens) == ("length", None, 4)

        whole = client.complete([5, 6, 7], FEW)
        assert (whole.text, whole.token_ids) == ("abcd", tuple(ids))
        assert whole.accepted.prompt_tokens == 3
        stopped = client.complete("x", Sampling(stop=("c",)))
        assert (stopped.text, stopped.finished.matched_stop) == ("ab", "c")

        chat = [Message("user", "hi")]
        assert tokenizer.decode(client.tokenize(chat)) == "user\nhi\nassistant\n"
        assert client.tokenize("abcd") == ids
        model = client.get_model()
        assert (model.name, model.eos_token_ids, model.has_chat_template) == ("tiny", (2,), True)
        status = client.status()
        assert [engine.engine_id for engine in status.engines] == ["engine-a", "engine-b"]
        assert status.model == model


def test_leaving_the_loop_cancels(tokenizer: Tokenizer) -> None:
    script = Script([70], step_s=0.01)
    with live_gateway(tokenizer, script) as wire, Client(wire.address) as client:
        events = client.generate("x")
        next(events)
        wait_for(lambda: len(wire.source.open_streams) == 1)
        events.close()
        wait_for(lambda: not wire.source.open_streams)


def test_errors_say_who_has_to_act(tokenizer: Tokenizer) -> None:
    script = Script([70])
    with live_gateway(tokenizer, script) as wire, Client(wire.address) as client:
        with pytest.raises(InvalidRequest) as invalid:
            client.complete("x", Sampling(temperature=math.nan, top_k=-1))
        fields = {violation.field for violation in invalid.value.violations}
        assert fields == {"sampling.temperature", "sampling.top_k"}
        assert invalid.value.reason == "INVALID_REQUEST"
        with pytest.raises(ClientError) as unknown:
            client.complete("x", model="other")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND

        wire.source.open_error = Overloaded("full", 2.5)
        with pytest.raises(RetryableError) as busy:
            list(client.generate("x"))
        assert busy.value.retry_after_s == 2.5
        wire.source.open_error = SequenceFailed("NaN")
        with pytest.raises(ServerError) as failed:
            client.complete("x")
        assert not isinstance(failed.value, RetryableError)
        wire.source.open_error = None
        # From the transport, without details: sending it again would not help.
        with pytest.raises(ClientError) as large:
            client.complete([1] * (5 << 20))
        assert large.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED

        script.step_s = 0.05
        with pytest.raises(DeadlineExceeded):
            client.complete("x", timeout_s=0.1)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ("x", Sampling(seed=-1)),
        ("x", Sampling(max_tokens=2**63)),
        ("x", Sampling(stop_token_ids=(-1,))),
        ([-1], None),
        ([1, Message("user", "x")], None),
        (None, None),
        (Message("user", "x"), None),
        (["a text in a list"], None),
    ],
)
def test_what_no_message_can_hold(prompt: object, sampling: Sampling | None) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest):
        client.generate(prompt, sampling)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e20, "5"])
def test_deadlines_that_no_call_can_have(timeout_s: float) -> None:
    with Client("127.0.0.1:1") as client:
        calls: list[Callable[[], object]] = [
            lambda: client.generate("x", timeout_s=timeout_s),
            lambda: client.complete("x", timeout_s=timeout_s),
            lambda: client.tokenize("x", timeout_s=timeout_s),
            lambda: client.status(timeout_s=timeout_s),
            lambda: client.ready(timeout_s=timeout_s),
            lambda: client.wait_ready(timeout_s=timeout_s),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest, match="timeout_s must be 0 to 31622400 s") as caught:
                call()
            assert [v.field for v in caught.value.violations] == ["timeout_s"]


@in_loop
async def test_deadlines_that_no_asynchronous_call_can_have() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="timeout_s must be"):
            client.generate("x", timeout_s=math.inf)
        for call in (client.complete("x", timeout_s=math.nan), client.wait_ready(-1.0)):
            with pytest.raises(InvalidRequest, match="timeout_s must be"):
                await call


def test_the_longest_deadline_works(tokenizer: Tokenizer) -> None:
    with live_gateway(tokenizer, Script([70])) as wire, Client(wire.address) as client:
        assert client.complete("x", FEW, timeout_s=MAX_TIMEOUT_S).finished.completion_tokens == 4


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client:
        assert not client.ready()
        with pytest.raises(RetryableError):
            client.status(timeout_s=2)
        with pytest.raises(DeadlineExceeded, match="not ready within"):
            client.wait_ready(timeout_s=0.3)


def test_ready_follows_the_server(tokenizer: Tokenizer) -> None:
    with live_gateway(tokenizer, Script([70])) as wire, Client(wire.address) as client:
        wire.source.is_ready = False
        wait_for(lambda: not client.ready())
        timer = threading.Timer(0.3, setattr, (wire.source, "is_ready", True))
        timer.start()
        client.wait_ready(timeout_s=5)
        timer.join()


@in_loop
async def test_an_asynchronous_client(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcd")
    async with gateway(tokenizer, Script(ids)) as wire, AsyncClient(wire.address) as client:
        await client.wait_ready(timeout_s=5)
        events = [event async for event in client.generate("hello", FEW)]
        assert "".join(e.text for e in events if isinstance(e, Delta)) == "abcd"
        assert (await client.complete("x", FEW)).text == "abcd"
        assert await client.tokenize("abcd") == ids
        assert (await client.get_model()).name == "tiny"
        assert (await client.status()).ready
        with pytest.raises(InvalidRequest):
            await client.complete("")

        wire.source.script.step_s = 0.01
        async with contextlib.aclosing(client.generate("x")) as stream:
            await anext(stream)
            assert len(wire.source.open_streams) == 1
        await eventually(lambda: not wire.source.open_streams)
        with pytest.raises(DeadlineExceeded):
            await client.complete("x", timeout_s=0.05)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=headway.test"]
    command += ["-addext", "subjectAltName=DNS:headway.test", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return TlsFiles(certificate, key)


def test_tls_and_keys(tokenizer: Tokenizer, tls: TlsFiles, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", "utf-8")
    config = loopback(tls=tls, api_keys_file=keys)
    with live_gateway(tokenizer, Script([70]), config) as wire:
        trusted = Connection(wire.address, "secret", tls.certificate, "headway.test")
        assert "secret" not in repr(trusted)
        with Client(trusted) as client:
            assert client.complete("x", FEW).finished.completion_tokens == 4
        with Client(Connection(wire.address, None, tls.certificate, "headway.test")) as client:
            # Probes need no key, requests do.
            assert client.ready()
            with pytest.raises(ClientError) as refused:
                client.complete("x", FEW)
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        with Client(wire.address) as client, pytest.raises(RetryableError):
            client.complete("x", FEW, timeout_s=2)


def test_one_client_in_many_threads(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcd")
    texts: list[str] = []

    def work(client: Client) -> None:
        texts.extend(client.complete("x", FEW).text for _ in range(5))

    with live_gateway(tokenizer, Script(ids)) as wire, Client(wire.address) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["abcd"] * 40


@in_loop
async def test_a_call_that_a_server_ends_because_it_stops_may_be_sent_again(
    tokenizer: Tokenizer,
) -> None:
    """Beyond its grace period a server cancels what is left; that is a loss, not our giving up."""
    script = Script([70, 71, 72], step_s=0.02)
    async with gateway(tokenizer, script) as wire, AsyncClient(wire.address) as client:
        seen: list[object] = []

        async def reading() -> None:
            async for event in client.generate("ab", Sampling(max_tokens=200)):
                seen.append(event)

        reader = asyncio.ensure_future(reading())
        await eventually(lambda: len(seen) > 3)
        await wire.server.stop(0.1)
        with pytest.raises(RetryableError):
            await reader
        assert len(seen) < 200


def test_every_client_of_a_process_has_a_connection_of_its_own(tokenizer: Tokenizer) -> None:
    """Or routers that share an address would not share the work of such a process."""
    with live_gateway(tokenizer, Script(tokenizer.encode("a"))) as wire:
        before = connections_to(wire.address)
        with Client(wire.address) as one, Client(wire.address) as other:
            for client in (one, other):
                client.wait_ready(timeout_s=5)
            assert connections_to(wire.address) == before + 2

    async def scenario() -> None:
        async with gateway(tokenizer, Script(tokenizer.encode("a"))) as wire:
            before = connections_to(wire.address)
            async with AsyncClient(wire.address) as one, AsyncClient(wire.address) as other:
                for client in (one, other):
                    await client.wait_ready(5)
                assert connections_to(wire.address) == before + 2

    asyncio.run(scenario())
