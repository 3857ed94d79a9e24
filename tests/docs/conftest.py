from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster.sim.shadow import ShadowExecutor
from cluster.text.tokenizer import Tokenizer
from tests.hop.support import Engine, PacedExecutor
from tests.unit.text.text_folders import byte_level_folder
from tests.wire.stack import stack


class Literate(PacedExecutor):
    """Knows every id of the tokenizer."""

    def __init__(self, step_s: float, *, num_blocks: int, block_size: int) -> None:
        ShadowExecutor.__init__(
            self, num_blocks=num_blocks, block_size=block_size, vocab=1000, max_len=400
        )
        self.step_s = step_s


def engine(name: str) -> Engine:
    return Engine(name, num_blocks=256, executor_type=Literate)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a router with engine-1 and engine-2, all in a thread."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))
    started = threading.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with stack(tokenizer, engine("engine-1"), engine("engine-2")) as running:
            done = asyncio.Event()
            found.append((running.address, asyncio.get_running_loop(), done))
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="router")
    thread.start()
    assert started.wait(20), "the router did not start"
    at, loop, done = found[0]
    yield at
    loop.call_soon_threadsafe(done.set)
    thread.join(20)
