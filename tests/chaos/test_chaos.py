"""The short form: at least 20 SIGKILLs and 10 SIGSTOPs under 64 streams. `make chaos` is longer.

Who was stopped comes back to links that were given up: two producers are never both heard (R41).
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from headway.client import AsyncClient, Delta, Sampling
from headway.errors import RetryableError
from tests.chaos.cluster import Cluster
from tests.chaos.run import scenario
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def test_no_token_is_lost_doubled_or_reordered_whatever_dies() -> None:
    report = asyncio.run(scenario(kills=20, stops=10, concurrent=64, least=200, seed=1))
    print("\n".join(report.lines()))
    assert report.wrong == []
    assert len(report.failed) <= 0.001 * report.streams, report.lines()
    assert report.streams >= 200
    assert report.replays > 20, "the faults hit nobody"
    assert max(report.noticed_s) < 3.0


def test_a_router_that_hangs_is_noticed_by_its_client(tmp_path: Path) -> None:
    """Stopped for good, with the connection open: pings find out, within seconds."""

    async def scenario_of_one() -> None:
        model = write_tiny_folder(tmp_path / "tiny", max_len=1 << 15)
        async with Cluster(model, engines=1, routers=1) as cluster:
            (router,) = [m for m in cluster.members if m.kind == "router"]
            async with AsyncClient(cluster.addresses[0]) as client:
                await client.wait_ready(20.0)
                asked = Sampling(max_tokens=3000, ignore_eos=True)
                events = client.generate([5, 6, 7], asked)
                async for event in events:
                    if isinstance(event, Delta):
                        router.send(signal.SIGSTOP)
                        break
                began = time.monotonic()
                with pytest.raises(RetryableError):
                    async for _ in events:
                        pass
                assert time.monotonic() - began < 15.0

    asyncio.run(scenario_of_one())
