"""Router and engines over real sockets: tokens are exact whatever happens to an engine."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cluster.core.errors import InvalidRequest, Overloaded, SlowReader, Unavailable
from cluster.core.outcome import FinishReason
from cluster.core.policies import BATCHING, PolicyChoice
from cluster.hop import codec
from cluster.hop.messages import PROTOCOL_VERSION, Goodbye, Hello, Submit
from cluster.router.active import MAX_BATCH
from cluster.router.dispatcher import DispatcherSettings
from tests.hop.support import (
    SECRET,
    Engine,
    expected,
    fleet,
    read_all,
    request,
    settled,
    waits,
)
from tests.wire.wire_support import eventually


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_two_engines_serve_many_streams_exactly():
    async def scenario():
        engines = Engine("a"), Engine("b")
        async with fleet(*engines) as dispatcher:
            requests = [request(n, max_tokens=1 + n % 50) for n in range(64)]
            streams = [await dispatcher.open(r) for r in requests]
            outputs = await asyncio.gather(*(read_all(s) for s in streams))
            assert outputs == [expected(r) for r in requests]
            for engine in engines:
                assert engine.executor.steps > 0, "placement left an engine idle"
                await settled(engine)
            assert dispatcher.active_streams == 0

    run(scenario())


def test_preempted_streams_are_exact():
    async def scenario():
        choice = PolicyChoice(reservation="prompt")
        engine = Engine("a", num_blocks=30, policies=choice)
        async with fleet(engine) as dispatcher:
            requests = [request(n, max_tokens=60) for n in range(12)]
            streams = [await dispatcher.open(r) for r in requests]
            outputs = await asyncio.gather(*(read_all(s) for s in streams))
            assert outputs == [expected(r) for r in requests]
            assert engine.loop.load.preemptions > 0
            assert sum(s.timing.preemptions for s in streams) == engine.loop.load.preemptions
            await settled(engine)

    run(scenario())


@pytest.mark.parametrize("batching", BATCHING)
def test_every_batching_policy_serves_for_real(batching):
    async def scenario():
        choice = PolicyChoice(batching, max_queue_delay_s=0.02, max_batch_wait_s=0.05)
        engine = Engine("a", num_blocks=120, policies=choice)
        async with fleet(engine) as dispatcher:
            requests = [request(n, max_tokens=1 + n * 7 % 50) for n in range(40)]
            streams = [await dispatcher.open(r) for r in requests]
            outputs = await asyncio.gather(*(read_all(s) for s in streams))
            assert outputs == [expected(r) for r in requests]
            await settled(engine)

    run(scenario())


def test_streams_of_a_lost_engine_go_on_elsewhere():
    async def scenario():
        engines = Engine("a", step_s=0.005), Engine("b", step_s=0.005)
        async with fleet(*engines) as dispatcher:
            requests = [request(n, max_tokens=60) for n in range(16)]
            streams = [await dispatcher.open(r) for r in requests]
            readers = [asyncio.create_task(read_all(s)) for s in streams]
            await asyncio.sleep(0.1)
            await engines[0].stop()
            assert await asyncio.gather(*readers) == [expected(r) for r in requests]
            assert sum(s.timing.replays for s in streams) > 0
            await settled(engines[1])

    run(scenario())


def test_streams_wait_for_an_engine_and_survive_its_restart():
    async def scenario():
        engine = Engine("a", step_s=0.005)
        async with fleet(engine) as dispatcher:
            reqs = [request(n, max_tokens=50) for n in range(4)]
            readers = [asyncio.create_task(read_all(await dispatcher.open(r))) for r in reqs]
            await asyncio.sleep(0.05)
            await engine.stop()
            late = request(9)
            readers.append(asyncio.create_task(read_all(await dispatcher.open(late))))
            restarted = Engine("a", step_s=0.001)
            await restarted.start(engine.port)
            assert await asyncio.gather(*readers) == [expected(r) for r in [*reqs, late]]
            await settled(restarted)
            await restarted.stop()

    run(scenario())


def test_the_queue_time_counts_the_wait_for_an_engine():
    async def scenario():
        engine = Engine("a")
        address = await engine.start()
        async with fleet() as dispatcher:
            waiting = await dispatcher.open(request(1))
            await asyncio.sleep(0.4)
            await dispatcher.set_engines({address})
            await read_all(waiting)
            assert 0.4 <= waiting.timing.queue_s <= waiting.timing.first_token_s
            at_once = await dispatcher.open(request(2))
            await read_all(at_once)
            assert at_once.timing.queue_s < 0.3
        await engine.stop()

    run(scenario())


def test_a_silent_engine_is_lost():
    async def scenario():
        engines = Engine("a", step_s=0.002), Engine("b", step_s=0.002)
        async with fleet(*engines, silence_s=0.6) as dispatcher:
            reqs = [request(n, max_tokens=100) for n in range(8)]
            readers = [asyncio.create_task(read_all(await dispatcher.open(r))) for r in reqs]
            await asyncio.sleep(0.05)
            # A frozen process: the socket stays open, nothing comes.
            hop = engines[0].service._server
            hop._distribute = lambda report: None
            hop._heartbeat.cancel()
            assert await asyncio.gather(*readers) == [expected(r) for r in reqs]

    run(scenario())


def test_an_engine_whose_step_raises_is_left_at_once():
    async def scenario():
        engines = Engine("a", step_s=0.005), Engine("b", step_s=0.005)
        async with fleet(*engines) as dispatcher:
            reqs = [request(n, max_tokens=60) for n in range(8)]
            readers = [asyncio.create_task(read_all(await dispatcher.open(r))) for r in reqs]
            await asyncio.sleep(0.1)
            engines[0].executor.sequences.clear()  # the next step finds nothing and raises
            assert await asyncio.gather(*readers) == [expected(r) for r in reqs]
            assert "step loop died" in (engines[0].service.health_problem() or "")
            assert engines[1].service.health_problem() is None
            assert [e.engine_id for e in dispatcher.engines()] == ["b"]

    run(scenario())


def test_no_engine_within_the_wait_is_unavailable():
    async def scenario():
        async with fleet(settings=DispatcherSettings(fleet=waits(0.2))) as dispatcher:
            assert not dispatcher.ready()
            stream = await dispatcher.open(request(1))
            with pytest.raises(Unavailable, match="no engine came up within"):
                await stream.next()
            assert dispatcher.active_streams == 0

    run(scenario())


def test_closing_frees_the_blocks_at_once():
    async def scenario():
        engine = Engine("a", step_s=0.005)
        async with fleet(engine) as dispatcher:
            stream = await dispatcher.open(request(1, max_tokens=200))
            await stream.next()
            step = engine.loop.load.step
            stream.leave()
            stream.leave()
            await settled(engine)
            assert engine.loop.load.step - step <= 3
            assert dispatcher.active_streams == 0

    run(scenario())


def test_too_long_is_refused_with_limit_and_value():
    async def scenario():
        async with fleet(Engine("a", num_blocks=10)) as dispatcher:
            with pytest.raises(InvalidRequest, match=r"41 tokens, limit 40; max_tokens may be 30"):
                await dispatcher.open(request(1, max_tokens=31))
            with pytest.raises(InvalidRequest, match="50 tokens leave no room"):
                await dispatcher.open(request(1, max_tokens=1, prompt_len=50))

    run(scenario())


def test_a_stream_goes_only_where_it_fits():
    async def scenario():
        small, big = Engine("a", num_blocks=10), Engine("b", num_blocks=64)
        async with fleet(small, big) as dispatcher:
            req = request(1, max_tokens=100)
            assert await read_all(await dispatcher.open(req)) == expected(req)
            assert small.executor.steps == 0

    run(scenario())


def test_overload_is_refused_with_a_time_to_retry():
    async def scenario():
        async with fleet(Engine("a"), settings=DispatcherSettings(max_streams=2)) as dispatcher:
            streams = [await dispatcher.open(request(n, max_tokens=200)) for n in range(2)]
            with pytest.raises(Overloaded, match="2 streams are in flight") as refusal:
                await dispatcher.open(request(3))
            assert refusal.value.retry_after_s > 0
            for stream in streams:
                stream.leave()
            req = request(4)
            assert await read_all(await dispatcher.open(req)) == expected(req)

    run(scenario())


def test_a_slow_reader_is_paused_and_resumed_without_loss():
    async def scenario():
        engine = Engine("a")
        settings = DispatcherSettings(unread_limit=10)
        async with fleet(engine, settings=settings) as dispatcher:
            slow = request(1, max_tokens=150)
            stream = await dispatcher.open(slow)
            await asyncio.sleep(0.5)
            assert len(stream.log.emitted) < 60, "the producer was not paused"
            assert engine.loop.load.blocks_free == engine.loop.load.blocks_total
            quick = request(2)
            assert await read_all(await dispatcher.open(quick)) == expected(quick)
            assert await read_all(stream) == expected(slow)
            await settled(engine)

    run(scenario())


def test_a_reader_that_never_reads_is_ended_by_name():
    async def scenario():
        engine = Engine("a")
        settings = DispatcherSettings(unread_limit=10, slow_reader_s=0.3)
        async with fleet(engine, settings=settings) as dispatcher:
            stream = await dispatcher.open(request(1, max_tokens=150))
            await asyncio.sleep(0.8)
            await settled(engine)
            first = await stream.next()
            assert first.token_ids == expected(request(1, max_tokens=150))[: len(first.token_ids)]
            with pytest.raises(SlowReader, match="unread"):
                await stream.next()

    run(scenario())


V = PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([Hello(V, "r", "wrong")], "wrong cluster secret"),
        ([Hello(99, "r", SECRET)], "version 99"),
        ([Submit(1, [1], [], request(1).sampling)], "must be a hello"),
        (
            [Hello(V, "r", SECRET), Hello(V, "r", SECRET)],
            "second hello",
        ),
        (
            [Hello(V, "r", SECRET), Submit(1, [10_000], [], request(1).sampling)],
            "token ids",
        ),
    ],
)
def test_engine_refuses_what_is_not_the_protocol(messages, reason):
    async def scenario():
        engine = Engine("a")
        async with fleet(engine) as dispatcher:
            healthy = await dispatcher.open(request(5, max_tokens=60))
            reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
            for message in messages:
                writer.write(codec.encode(message))
            answers = []
            while (body := await codec.read_body(reader)) is not None:
                answers.append(codec.decode_down(body))
            assert isinstance(answers[-1], Goodbye)
            assert reason in answers[-1].reason
            writer.close()
            assert await read_all(healthy) == expected(request(5, max_tokens=60))

    run(scenario())


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x01\xc1"])
def test_junk_closes_its_own_connection_only(junk):
    async def scenario():
        engine = Engine("a")
        async with fleet(engine) as dispatcher:
            with socket.create_connection(("127.0.0.1", engine.port)) as stranger:
                stranger.sendall(junk)
                req = request(6)
                assert await read_all(await dispatcher.open(req)) == expected(req)

    run(scenario())


def test_a_reader_that_comes_late_gets_a_long_log_in_pieces():
    """Or one message would be as large as the context, with 21 log-probabilities for each token."""

    async def scenario():
        engine = Engine("a", num_blocks=110)
        async with fleet(engine) as dispatcher:
            asked = request(1, max_tokens=MAX_BATCH + 40)
            stream = await dispatcher.open(asked)
            await eventually(lambda: stream.log.finish is not None)
            batches = [await stream.next(), await stream.next()]
            assert [len(batch.token_ids) for batch in batches] == [MAX_BATCH, 40]
            assert [batch.first_index for batch in batches] == [0, MAX_BATCH]
            assert [batch.finish for batch in batches] == [None, FinishReason.LENGTH]
            assert [i for batch in batches for i in batch.token_ids] == expected(asked)
            await settled(engine)

    run(scenario())
