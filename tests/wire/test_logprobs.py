"""Log-probabilities over the whole path: a real model, the hop, gRPC; also after a lost engine and
for a stream that was resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.core.config import WorkerConfig
from cluster.gateway.config import GatewayConfig
from cluster.gateway.server import build_server
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.router.dispatcher import Dispatcher
from cluster.text.tokenizer import Tokenizer
from headway.client import AsyncClient, Delivery, Delta, InvalidRequest, Sampling
from tests.e2e.tiny_folder import write_tiny_folder
from workers.executor import LocalExecutor

PROMPT = [3 + 7 * i % 300 for i in range(40)]
ASKED = Sampling(
    max_tokens=30, temperature=0.0, ignore_eos=True, seed=1, logprobs=3, prompt_logprobs=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def served(
    folder: Path, engines: int
) -> AsyncIterator[tuple[AsyncClient, list[EngineService]]]:
    services, addresses = [], set()
    for number in range(engines):
        worker = WorkerConfig(model=str(folder), dtype="float32", device="cpu", num_blocks=60)
        service = EngineService(LocalExecutor(worker), EngineOptions(f"e{number}", "s"))
        addresses.add(("127.0.0.1", await service.start()))
        services.append(service)
    dispatcher = Dispatcher(LinkSettings("r", "s"))
    server = build_server(
        dispatcher, Tokenizer.from_folder(str(folder)), GatewayConfig(address="127.0.0.1:0")
    )
    await server.start()
    await dispatcher.set_engines(addresses)
    while len(dispatcher.engines()) < engines:
        await asyncio.sleep(0.01)
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        yield client, services
    await server.stop(0.0)
    await dispatcher.close()
    for service in services:
        await service.stop("test")


def test_every_id_has_its_probability_and_the_likeliest(folder: Path) -> None:
    async def scenario() -> None:
        async with served(folder, 1) as (client, _):
            whole = await client.complete(PROMPT, ASKED)
            assert [entry.token_id for entry in whole.logprobs] == list(whole.token_ids)
            for entry in whole.logprobs:
                values = [logprob for _, logprob in entry.top]
                assert len(values) == 3
                assert values == sorted(values, reverse=True)
                # Greedy: what was drawn is the likeliest.
                assert entry.top[0] == (entry.token_id, entry.logprob)
                assert entry.logprob < 0
            assert [entry.token_id for entry in whole.prompt_logprobs] == PROMPT[1:]
            assert all(len(entry.top) == 2 for entry in whole.prompt_logprobs)
            plain = await client.complete(PROMPT, Sampling(max_tokens=3, temperature=0.0))
            assert plain.logprobs == plain.prompt_logprobs == ()
            with pytest.raises(InvalidRequest, match=r"logprobs.*between 0 and 20"):
                await client.complete(PROMPT, Sampling(max_tokens=3, logprobs=21))

    asyncio.run(scenario())


def test_a_lost_engine_and_a_resumed_call_change_none_of_them(folder: Path) -> None:
    async def scenario() -> None:
        async with served(folder, 2) as (client, services):
            whole = await client.complete(PROMPT, ASKED)
            seen, token, prompt = [], "", ()
            delivery = Delivery(resume_window_s=20.0)
            events = client.generate(PROMPT, ASKED, delivery=delivery)
            async for event in events:
                token = token or getattr(event, "resume_token", "")
                if isinstance(event, Delta):
                    seen += event.logprobs
                    prompt = prompt or event.prompt_logprobs
                    if len(seen) >= 5:
                        break
            # The call is not closed: that would forget the stream. The engine is lost meanwhile.
            busy = [s for s in services if s.loop.load.running]
            for service in busy:
                await service.stop("lost")
            async for event in client.resume(token, len(seen)):
                if isinstance(event, Delta):
                    assert event.first_index == len(seen)
                    seen += event.logprobs
            await events.aclose()
            assert prompt == whole.prompt_logprobs
            assert [e.token_id for e in seen] == list(whole.token_ids)
            for mine, theirs in zip(seen, whole.logprobs, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)

    asyncio.run(scenario())
