"""Engines and routers as processes, restarted when they die, and the faults that hit them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from headway.client import AsyncClient
from headway.errors import HeadwayRpcError

READY_S = 90.0
REPO = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@dataclass
class Member:
    """A process that is started again whenever it ends."""

    kind: str
    name: str
    port: int
    arguments: list[str]
    starts: int = 0
    stopped: bool = False
    up: bool = False
    process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        while True:
            self.starts += 1
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.member",
                self.kind,
                self.name,
                str(self.port),
                *self.arguments,
                cwd=REPO,
                env=dict(os.environ, PYTHONPATH=f"{REPO}{os.pathsep}{REPO / 'proto'}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self.process.stdout is not None
            self.up = (await self.process.stdout.readline()).strip() == b"ready"
            await self.process.wait()
            self.up = self.stopped = False
            await asyncio.sleep(0.05)

    @property
    def well(self) -> bool:
        return self.up and not self.stopped

    def send(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


@dataclass
class Cluster:
    """Context manager; `members` are engines first, then routers."""

    model: Path
    engines: int = 3
    routers: int = 2
    members: list[Member] = field(default_factory=list)

    async def __aenter__(self) -> Cluster:
        ports = free_ports(self.engines + self.routers)
        engine_ports, router_ports = ports[: self.engines], ports[self.engines :]
        listed = ",".join(map(str, engine_ports))
        for number, port in enumerate(engine_ports):
            self.members.append(Member("engine", f"engine-{number}", port, [str(self.model)]))
        for number, port in enumerate(router_ports):
            arguments = [str(self.model), listed]
            self.members.append(Member("router", f"router-{number}", port, arguments))
        self.addresses = [f"127.0.0.1:{port}" for port in router_ports]
        self._keepers = [asyncio.create_task(member.keep()) for member in self.members]
        deadline = time.monotonic() + READY_S
        while not all(member.up for member in self.members):
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster did not come up")
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for member in self.members:
            # A stopped process cannot end by itself.
            member.send(signal.SIGKILL)
            if member.process is not None:
                await member.process.wait()

    def target(self, first: int) -> str:
        """For gRPC: all routers, that one preferred."""
        order = self.addresses[first:] + self.addresses[:first]
        return "ipv4:" + ",".join(order)


@dataclass
class Faults:
    """What is done to whom: by seed, but never to the last one of a kind that is well."""

    cluster: Cluster
    kills: int
    stops: int
    seed: int
    pause_s: tuple[float, float]
    done: list[tuple[str, str]] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        chooser = random.Random(self.seed)
        plan = ["kill"] * self.kills + ["stop"] * self.stops
        chooser.shuffle(plan)
        tasks: list[asyncio.Task[None]] = []
        for fault in plan:
            await asyncio.sleep(chooser.uniform(*self.pause_s))
            victim = await self._victim(chooser)
            self.done.append((fault, victim.name))
            if fault == "kill":
                victim.send(signal.SIGKILL)
            else:
                victim.stopped = True
                victim.send(signal.SIGSTOP)
                tasks.append(asyncio.create_task(self._thaw(victim, chooser.uniform(0.5, 4.0))))
            if victim.kind == "engine":
                tasks.append(asyncio.create_task(self._watch(victim.name)))
        await asyncio.gather(*tasks)

    async def _watch(self, engine: str) -> None:
        """How long a router that is well goes on listing the engine; 5 s is the end of it (an
        engine that was stopped for a moment only is never let go of)."""
        began = time.monotonic()
        router = next(m for m in self.cluster.members if m.kind == "router" and m.well)
        async with AsyncClient(f"127.0.0.1:{router.port}") as client:
            while time.monotonic() - began < 5.0:
                try:
                    status = await client.status(timeout_s=1.0)
                except HeadwayRpcError:
                    return
                if engine not in {e.engine_id for e in status.engines}:
                    self.noticed_s.append(time.monotonic() - began)
                    return
                await asyncio.sleep(0.02)

    async def _victim(self, chooser: random.Random) -> Member:
        while True:
            candidates = [
                member
                for member in self.cluster.members
                if member.well and sum(m.well for m in self._kin(member)) > 1
            ]
            if candidates:
                return chooser.choice(candidates)
            await asyncio.sleep(0.05)

    def _kin(self, member: Member) -> list[Member]:
        return [m for m in self.cluster.members if m.kind == member.kind]

    @staticmethod
    async def _thaw(victim: Member, after_s: float) -> None:
        await asyncio.sleep(after_s)
        victim.stopped = False
        victim.send(signal.SIGCONT)
