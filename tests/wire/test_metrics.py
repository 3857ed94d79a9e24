"""Real streams through gateway, hop and engines; then the scrapes say what the clients counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from cluster.cli import build_parser
from cluster.core.policies import PolicyChoice
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.gateway.config import Limits
from cluster.router.dispatcher import DispatcherSettings
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2 as pb
from tests.hop.support import Engine, settled
from tests.unit.metrics.scrape import Samples, fetch, samples
from tests.wire.stack import ROUTER_ID, Stack, request, stack
from tests.wire.wire_support import eventually, in_loop, loopback


@dataclass
class Seen:
    """What one client counted."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    began_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def gaps(self) -> list[float]:
        times = [at for at, _ in self.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]


async def read(running: Stack, asked: pb.GenerateRequest) -> Seen:
    seen = Seen(began_s=time.monotonic())
    async for event in running.inference.Generate(asked):
        if event.HasField("delta"):
            seen.arrivals.append((time.monotonic(), len(event.delta.token_ids)))
    return seen


async def scraped(address: str) -> Samples:
    return samples(await asyncio.to_thread(fetch, address))


@in_loop
async def test_scrapes_reconcile_with_what_clients_saw(tokenizer: Tokenizer) -> None:
    engine = Engine("e0", num_blocks=256, step_s=0.004)
    async with stack(tokenizer, engine) as running:
        clients = [read(running, request(n, max_tokens=20 + n)) for n in range(12)]
        ledger = await asyncio.gather(*clients)
        await settled(engine)
        await eventually(lambda: running.board.metrics.calls == 0)
        router = await scraped(running.board.address)
        found = await scraped(running.engines()[0][1])

    tokens = sum(seen.tokens for seen in ledger)
    assert tokens == sum(20 + n for n in range(12))
    assert router["headway_router_output_tokens_total",] == tokens
    assert router["headway_router_prompt_tokens_total",] == 120
    assert router["headway_router_ttft_seconds_count",] == 12
    assert router["headway_router_itl_seconds_count",] == tokens - 12
    for name in ("tpot", "longest_gap", "queue", "call"):
        assert router[f"headway_router_{name}_seconds_count",] == 12
    assert router["headway_router_calls_total", "Generate", "OK"] == 12
    assert router["headway_router_finished_total", "length"] == 12
    assert router["headway_router_engines", "taking"] == 1
    # Sums of times: the client's clock starts earlier and ends later, and shares these two cores.
    gaps = sum(sum(seen.gaps) for seen in ledger)
    assert router["headway_router_itl_seconds_sum",] == pytest.approx(gaps, rel=0.2)
    longest = sum(max(seen.gaps) for seen in ledger)
    assert router["headway_router_longest_gap_seconds_sum",] == pytest.approx(longest, rel=0.5)
    ttft = sum(seen.arrivals[0][0] - seen.began_s for seen in ledger)
    assert 0 < router["headway_router_ttft_seconds_sum",] <= ttft

    assert found["headway_engine_emitted_tokens_total",] == tokens
    assert found["headway_engine_admitted_tokens_total",] == 120
    assert found["headway_engine_computed_tokens_total",] == 120 + tokens - 12
    assert found["headway_engine_steps_total",] == found["headway_engine_step_seconds_count",]
    assert found["headway_engine_running",] == found["headway_engine_waiting",] == 0
    assert found["headway_engine_kv_blocks", "held"] == 0
    assert found["headway_engine_routers",] == 1
    assert found["headway_engine_budget_tokens",] == 32
    assert found["headway_engine_info", "e0", "shadow", running.board.summary().version] == 1


@in_loop
async def test_a_slow_step_shows_in_its_bucket(tokenizer: Tokenizer) -> None:
    engine = Engine("e0", step_s=0.001)
    async with stack(tokenizer, engine) as running:
        reading = asyncio.create_task(read(running, request(1, max_tokens=240)))
        await asyncio.sleep(0.1)
        engine.executor.step_s = 0.060
        await asyncio.sleep(0.1)
        engine.executor.step_s = 0.0
        await reading
        router = await scraped(running.board.address)
        found = await scraped(running.engines()[0][1])
    for text, name in ((router, "headway_router_itl"), (found, "headway_engine_step")):
        bucket = f"{name}_seconds_bucket"
        assert text[bucket, "+Inf"] - text[bucket, "0.055"] >= 1
        assert text[bucket, "0.04"] > 100
    assert router["headway_router_longest_gap_seconds_sum",] >= 0.058


@in_loop
async def test_refusals_have_a_reason(tokenizer: Tokenizer) -> None:
    gate = GateSettings(max_queued=0)
    settings = DispatcherSettings(fleet=FleetSettings(gate=gate))
    config = loopback(limits=Limits(max_in_flight=3))
    engine = Engine("e0", num_blocks=8, step_s=0.01)
    async with stack(tokenizer, engine, settings=settings, config=config) as running:
        first = asyncio.create_task(read(running, request(1, max_tokens=15)))
        await eventually(lambda: running.dispatcher.facts().streams == 1)
        await eventually(lambda: engine.loop.load.running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(running, request(2, max_tokens=15, prompt_len=17))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError):
            await read(running, request(3, max_tokens=10_000))
        await first
        router = await scraped(running.board.address)
    assert router["headway_router_refusals_total", "queued_requests"] == 1
    assert router["headway_router_calls_total", "Generate", "RESOURCE_EXHAUSTED"] == 1
    assert router["headway_router_calls_total", "Generate", "INVALID_ARGUMENT"] == 1
    assert router["headway_router_calls_total", "Generate", "OK"] == 1
    assert sum(v for k, v in router.items() if k[0] == "headway_router_refusals_total") == 1


@in_loop
async def test_calls_beyond_the_limit_and_cancels_are_counted(tokenizer: Tokenizer) -> None:
    config = loopback(limits=Limits(max_in_flight=1))
    async with stack(tokenizer, Engine("e0", step_s=0.02), config=config) as running:
        call = running.inference.Generate(request(1, max_tokens=200))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await read(running, request(2))
        call.cancel()
        await eventually(lambda: running.board.metrics.calls == 0)
        late = running.inference.Generate(request(3, max_tokens=200), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in late:
                pass
        await eventually(lambda: running.board.metrics.calls == 0)
        router = await scraped(running.board.address)
    assert router["headway_router_refusals_total", "calls"] == 1
    assert router["headway_router_calls_total", "Generate", "CANCELLED"] == 1
    assert router["headway_router_calls_total", "Generate", "DEADLINE_EXCEEDED"] == 1
    assert router["headway_router_call_seconds_count",] == 2


@in_loop
async def test_a_lost_engine_shows_as_replays(tokenizer: Tokenizer) -> None:
    first, second = Engine("e0", step_s=0.01), Engine("e1", step_s=0.01)
    async with stack(tokenizer, first, second) as running:
        reading = [asyncio.create_task(read(running, request(n, 60))) for n in range(6)]
        await eventually(lambda: first.loop.load.running + second.loop.load.running == 6)
        moved = first.loop.load.running
        assert 0 < moved < 6
        await first.stop()
        seen = await asyncio.gather(*reading)
        assert [s.tokens for s in seen] == [60] * 6
        router = await scraped(running.board.address)
    assert router["headway_router_engines_lost_total", "left"] == 1
    assert router["headway_router_replays_total", "left"] == moved
    assert router["headway_router_replayed_tokens_total",] >= 10 * moved
    assert router["headway_router_engines", "taking"] == 1
    assert router["headway_router_output_tokens_total",] == 360


@in_loop
async def test_preemptions_have_a_cause_and_a_tax(tokenizer: Tokenizer) -> None:
    policies = PolicyChoice(reservation="on-demand", prefix_cache="on")
    settings = DispatcherSettings(fleet=FleetSettings())
    engine = Engine("e0", num_blocks=24, step_s=0.001, policies=policies)
    async with stack(tokenizer, engine, settings=settings) as running:
        seen = await asyncio.gather(*(read(running, request(n, 60)) for n in range(4)))
        assert [s.tokens for s in seen] == [60] * 4
        await settled(engine)
        found = await scraped(running.engines()[0][1])
        # The same prompts again: the cache still has one of them at least.
        await asyncio.gather(*(read(running, request(n, 5)) for n in range(4)))
        again = await scraped(running.engines()[0][1])
    assert found["headway_engine_preemptions_total", "blocks"] > 0
    assert found["headway_engine_preemptions_total", "priority"] == 0
    assert found["headway_engine_recomputed_tokens_total",] > 0
    assert found["headway_engine_stalled_seconds_total",] > 0
    hits = "headway_engine_prefix_hit_tokens_total"
    assert again[hits,] > found[hits,]
    assert again["headway_engine_kv_blocks", "cached"] > 0


@in_loop
async def test_one_target_names_all(tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, Engine("e0"), Engine("e1")) as running:
        text = await asyncio.to_thread(fetch, running.board.address, "/targets")
        found = {group["labels"]["id"]: group for group in json.loads(text)}
        assert found.keys() == {"e0", "e1", ROUTER_ID}
        assert found[ROUTER_ID]["labels"]["role"] == "router"
        for name, address in running.engines():
            assert found[name]["targets"] == [address]
            assert (await scraped(address))["headway_engine_routers",] == 1


def test_the_front_door_names_the_same_targets(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """For where the metrics ports of routers cannot be reached: `headway metrics targets`."""
    file = tmp_path / "targets.json"

    @in_loop
    async def scenario() -> None:
        async with stack(tokenizer, Engine("e0")) as running:
            run = partial(headway, "metrics", "targets", "--address", running.address)
            assert await asyncio.to_thread(run, "--file", str(file)) == 0
            text = await asyncio.to_thread(fetch, running.board.address, "/targets")
            assert file.read_text() == text
            assert text.count('"targets"') == 2
            running.board.peers = [running.board.summary()._replace(router_id="r1", metrics="h:1")]
            assert await asyncio.to_thread(run, "--file", str(file)) == 0
            assert '"h:1"' in file.read_text()

    scenario()
    assert list(tmp_path.iterdir()) == [file]
    before = file.read_text()
    assert headway("metrics", "targets", "--address", "127.0.0.1:1", "--file", str(file)) == 1
    assert file.read_text() == before


def headway(*arguments: str) -> int:
    args = build_parser().parse_args(arguments)
    code: int = args.run(args)
    return code
