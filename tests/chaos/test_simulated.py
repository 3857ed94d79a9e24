"""Thousands of faults by seed: ids equal the reference, nothing is left behind. A lost message is
a gap in a sequence and never a hang (R40).

A failing seed replays: `python -m tests.chaos.test_simulated SEED`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace

import pytest

from cluster.core.invariants import check_idle
from cluster.core.sampling import SamplingParams, choice_seed
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.relief import ReliefSettings
from cluster.hop.link import LinkSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.kept import tokens_of
from cluster.router.stream import GenerationRequest, TokenStream
from cluster.sim.shadow import reference_output
from tests.chaos.network import SECRET, VOCAB, Network

SEEDS = 300
STREAMS = 14
FAULT_SHARE = 0.03


def asked(number: int, chooser: random.Random) -> GenerationRequest:
    prompt = tuple(chooser.randrange(VOCAB) for _ in range(chooser.randrange(1, 40)))
    sampling = SamplingParams(
        max_tokens=chooser.randrange(1, 60),
        temperature=float(number % 2),
        seed=number,
        stop_token_ids=(3, 4) if number % 3 == 0 else (),
        min_tokens=1,
    )
    return GenerationRequest(
        f"r{number}",
        prompt,
        sampling,
        tenant=f"t{number % 3}",
        priority=number % 3,
        resume_window_s=1e6 if number % 4 == 0 else 0.0,
    )


def choices_of(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """One call with n outputs."""
    return [
        replace(
            request,
            sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, choice)),
            choice=choice,
        )
        for choice in range(n)
    ]


class Reader:
    """Reads now and then, checks that indexes follow each other; may leave and come back."""

    def __init__(self, request: GenerationRequest, stream: TokenStream) -> None:
        self.request, self.stream = request, stream
        self.ids: list[int] = []
        self.done = False

    async def read(self) -> None:
        log = self.stream.log  # type: ignore[attr-defined]
        if self.done or (len(log.emitted) == len(self.ids) and log.finish is None):
            # Nothing to read: next() would wait, and time stands still here.
            error = self.stream.stream._error  # type: ignore[attr-defined]
            assert error is None, error
            return
        batch = await self.stream.next()
        assert batch.first_index == len(self.ids), "lost or doubled"
        self.ids += batch.token_ids
        self.done = batch.finish is not None


async def scenario(seed: int) -> Network:
    chooser = random.Random(seed)
    network = Network(chooser)
    for slot in range(network.slots):
        network.start(slot)
    settings = DispatcherSettings(
        max_replays=10_000,
        unread_limit=20,
        slow_reader_s=1e9,
        fleet=FleetSettings(GateSettings(queue_timeout_s=1e9), ReliefSettings(max_moves=3)),
    )
    routers = [
        Dispatcher(LinkSettings(f"router-{n}", SECRET), settings, connect=network.connect)
        for n in range(2)
    ]
    addresses = {("sim", slot) for slot in range(network.slots)}
    for router in routers:
        await router.set_engines(addresses)
    readers: list[Reader] = []
    waiting = [asked(n, chooser) for n in range(STREAMS)]
    share, turns = FAULT_SHARE, 0
    while waiting or not all(reader.done for reader in readers):
        turns += 1
        if turns > 6000:
            # The storm is over: now everything must come to its end.
            share = 0.0
            for engine in network.engines.values():
                engine.server.drain(undo=True)
            network.calm()
        assert turns < 12_000, "no progress"
        network.turn(share)
        if waiting and chooser.random() < 0.02:
            call = choices_of(waiting.pop(), chooser.choice((1, 1, 3)))
            streams = await chooser.choice(routers).open_all(call)
            readers += map(Reader, call, streams)
        if readers and chooser.random() < 0.3:
            await chooser.choice(readers).read()
        if readers and chooser.random() < 0.005:
            await come_back(chooser.choice(readers), routers)
    # Whom a Forget does not reach keeps the log until its window is over.
    network.calm()
    for reader in readers:
        request = reader.request
        expected = reference_output(list(request.prompt_ids), request.sampling, VOCAB)
        assert reader.ids == expected, request
        reader.stream.leave()
        if reader.stream.resume_token:
            for router in routers:
                router.forget(reader.stream.resume_token)
    for _ in range(3):
        network.calm()
    for router in routers:
        assert router.active_streams == 0
        assert not router.fleet.waiting
    for engine in network.engines.values():
        check_idle(engine.core.scheduler)
        assert len(engine.server._keeper) == 0
    for router in routers:
        await router.close()
    return network


async def come_back(reader: Reader, routers: list[Dispatcher]) -> None:
    """The client of a kept stream loses its call and resumes, where the stream is kept."""
    token, choice = reader.stream.resume_token, reader.request.choice
    for router in routers:
        if token and tokens_of(token)[choice] in router._kept:
            reader.stream.leave()
            (resumed,) = await router.resume_all(token, {choice: len(reader.ids)})
            assert resumed.request == replace(reader.request, emitted_ids=tuple(reader.ids))
            reader.stream = resumed.stream


@pytest.mark.parametrize("part", range(5))
def test_no_fault_of_the_network_or_of_an_engine_costs_a_token(part):
    totals: dict[str, int] = {}
    for seed in range(part, SEEDS, 5):
        try:
            network = asyncio.run(scenario(seed))
        except BaseException:
            print(f"replay it: python -m tests.chaos.test_simulated {seed}")
            raise
        for name, count in network.faults.items():
            totals[name] = totals.get(name, 0) + count
    assert sum(totals.values()) > 500
    assert min(totals.values()) > 10, totals


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(seed, asyncio.run(scenario(seed)).faults)
