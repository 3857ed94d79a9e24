"""One process of the cluster under test: a real engine or a real router, without Ray.

`python -m tests.chaos.member engine NAME PORT MODEL` and `... router NAME PORT MODEL ENGINE_PORTS`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

SECRET = "chaos"
LOOPBACK = "127.0.0.1"
NUM_BLOCKS = 260


def engine(name: str, port: int, model: str) -> None:
    """Serves until it is killed; a step loop that died ends the process, as Serve would."""
    from cluster.core.config import WorkerConfig
    from cluster.hop.service import EngineOptions, EngineService
    from workers.executors import make_executor

    executor = make_executor(
        WorkerConfig(
            model=model,
            dtype="float32",
            device="cpu",
            num_blocks=NUM_BLOCKS,
            max_num_batched_tokens=128,
            max_num_seqs=32,
        )
    )
    options = EngineOptions(
        engine_id=name,
        secret=SECRET,
        port=port,
        max_num_batched_tokens=128,
        max_num_seqs=32,
    )

    async def serve() -> None:
        service = EngineService(executor, options)
        await service.start()
        print("ready", flush=True)
        while service.health_problem() is None:
            await asyncio.sleep(0.1)
        print(service.health_problem(), file=sys.stderr, flush=True)
        os._exit(1)

    asyncio.run(serve())


def router(name: str, port: int, model: str, engine_ports: list[int]) -> None:
    from cluster.gateway.config import GatewayConfig
    from cluster.gateway.server import build_server
    from cluster.hop.link import LinkSettings
    from cluster.router.dispatcher import Dispatcher, DispatcherSettings
    from cluster.text.tokenizer import Tokenizer

    async def serve() -> None:
        # In a chaos run a request may well lose more engines than it ever would.
        settings = DispatcherSettings(max_replays=1000)
        links = LinkSettings(name, SECRET, silence_s=1.0, retry_max_s=0.3)
        dispatcher = Dispatcher(links, settings)
        tokenizer = Tokenizer.from_folder(model)
        config = GatewayConfig(address=f"{LOOPBACK}:{port}")
        server = build_server(dispatcher, tokenizer, config)
        await server.start()
        await dispatcher.set_engines({(LOOPBACK, p) for p in engine_ports})
        print("ready", flush=True)
        await server.wait()

    asyncio.run(serve())


if __name__ == "__main__":
    kind, name, port, model, *rest = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if kind == "engine":
        engine(name, int(port), model)
    else:
        router(name, int(port), model, [int(p) for p in rest[0].split(",")])
