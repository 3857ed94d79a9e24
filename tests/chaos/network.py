"""Routers and engines of one process on a network that loses, repeats, delays and reorders frames
and cuts connections, all by seed and without a clock.

Dispatcher, fleet, token log, hop server, keeper, codec and engine core are the real ones; what is
replaced is the socket, the thread and the model (a shadow executor that checks every read).
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cluster.core.config import SchedulerConfig
from cluster.core.outcome import LossCause
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.engine import loop as commands
from cluster.engine.core import EngineCore, StepReport
from cluster.hop import codec
from cluster.hop.link import LinkListener, LinkSettings
from cluster.hop.messages import Adopted, Frame, Up, Welcome
from cluster.hop.server import EngineIdentity, HopServer, _Connection
from cluster.sim.shadow import ShadowExecutor

VOCAB = 97
BLOCK = 4
SECRET = "s"


class SimEngine:
    """One life of an engine: a core, a shadow model and a hop server. Killed, it is gone."""

    def __init__(self, name: str, epoch: int, num_blocks: int) -> None:
        self.name, self.epoch = name, epoch
        self.executor = ShadowExecutor(
            num_blocks=num_blocks, block_size=BLOCK, vocab=VOCAB, max_len=200
        )
        info = self.executor.info
        self.config = SchedulerConfig(
            max_num_batched_tokens=24,
            max_num_seqs=6,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_model_len=info.max_model_len,
        )
        # On demand, so that blocks run out and relief has something to do.
        policies = PolicyChoice(reservation="on-demand", queue="priority")
        self.core = EngineCore(make_scheduler(self.config, policies), 0.0)
        self.load = self.core.load(0.0)
        self.now = 0.0
        self.server = HopServer(
            EngineIdentity(name, epoch, SECRET, info, self.config.max_sequence_len, 6, 24)
        )
        self.server._engine = self  # type: ignore[assignment]

    # What the hop server needs of an EngineLoop.

    def post(self, command: commands.Command) -> None:
        refusal = None
        if isinstance(command, commands.Submit):
            refusal = self.core.submit(command.key, command.request, self.now)
        elif isinstance(command, commands.Abort):
            self.core.abort(command.key)
        elif isinstance(command, commands.Pause):
            self.core.pause(command.key)
        elif isinstance(command, commands.Resume):
            self.core.resume(command.key)
        elif isinstance(command, commands.DropConnection):
            self.core.drop_connection(command.connection)
        assert refusal is None

    def step(self) -> None:
        self.now += 0.01
        plan = self.core.begin_step(self.now)
        if plan is None:
            self.load = self.core.load(self.now)
            report = StepReport(self.load, [], [])
        else:
            report = self.core.complete_step(self.executor.submit(plan).wait(), self.now)
            self.load = report.load
        self.server._distribute(report)


class _Pipe:
    """The engine's writer: frames go into the link's queue."""

    def __init__(self, frames: deque[bytes]) -> None:
        self._frames = frames
        self.transport = self

    def write(self, data: bytes) -> None:
        self._frames.append(data[4:])

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


class SimLink:
    """A router's connection to the engine of one slot; stands for EngineLink."""

    def __init__(
        self, network: Network, address: tuple[str, int], router: str, listener: LinkListener
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        self.last_frame_s = 0.0
        self.up: deque[Up] = deque()
        self.down: deque[bytes] = deque()
        self._network = network
        self._router = router
        self._listener = listener
        self._connection: _Connection | None = None
        self._engine: SimEngine | None = None
        network.links.append(self)

    @property
    def connected(self) -> bool:
        return self.welcome is not None

    def send(self, message: Up) -> None:
        if self.connected:
            self.up.append(message)

    def connect(self) -> None:
        engine = self._network.engines.get(self.address[1])
        if engine is None or self.connected:
            return
        self._engine = engine
        self.up, self.down = deque(), deque()
        server = engine.server
        number = server._next_connection
        server._next_connection += 1
        self._connection = _Connection(number, self._router, _Pipe(self.down))  # type: ignore[arg-type]
        server._connections[number] = self._connection
        identity = server._identity
        self.welcome = Welcome(
            2, identity.engine_id, identity.epoch, identity.model, identity.max_sequence_len, 6, 24
        )
        self._listener.on_up(self, self.welcome)  # type: ignore[arg-type]

    lost_by = LossCause.CLOSED

    def disconnect(self, reason: str) -> None:
        """The router cuts; what was under way is lost in both directions."""
        if not self.connected:
            return
        engine, connection = self._engine, self._connection
        self.welcome = None
        self.up.clear()
        self.down.clear()
        if engine is not None and connection is not None:
            engine.server._connections.pop(connection.number, None)
            if self._network.engines.get(self.address[1]) is engine:
                engine.server._keeper.lose(connection.number)
                engine.post(commands.DropConnection(connection.number))
        self._listener.on_down(self, reason)  # type: ignore[arg-type]

    async def close(self) -> None:
        self.welcome = None

    def carry_up(self) -> None:
        if self.up and self._engine is not None and self._connection is not None:
            # Through the codec, as on the wire.
            message = codec.decode_up(codec.encode(self.up.popleft())[4:])
            self._engine.server._take(self._connection, message)

    def carry_down(self) -> None:
        if self.down:
            message = codec.decode_down(self.down.popleft())
            if isinstance(message, Adopted):
                self._listener.on_adopted(self, message)  # type: ignore[arg-type]
            elif isinstance(message, Frame):
                self._listener.on_frame(self, message)  # type: ignore[arg-type]


@dataclass
class Network:
    """Slots of engines and all links. faults: how often each was done."""

    chooser: random.Random
    slots: int = 3
    num_blocks: int = 40
    engines: dict[int, SimEngine] = field(default_factory=dict)
    links: list[SimLink] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    faults: dict[str, int] = field(default_factory=dict)
    _epoch: int = 0

    def start(self, slot: int) -> None:
        self._epoch += 1
        self.engines[slot] = SimEngine(f"e{slot}", self._epoch, self.num_blocks)

    def connect(self, address: tuple[str, int], settings: LinkSettings, listener: Any) -> Any:
        link = SimLink(self, address, settings.router_id, listener)
        link.connect()
        return link

    def turn(self, fault_share: float) -> None:
        """One thing happens: a step, a message, a connection, or a fault."""
        chooser = self.chooser
        if chooser.random() < fault_share:
            self._fault()
            return
        kind = chooser.randrange(4)
        awake = [s for s in self.engines if s not in self.frozen]
        if kind == 0 and awake:
            self.engines[chooser.choice(awake)].step()
        elif kind == 3:
            self._mend()
        else:
            link = chooser.choice(self.links)
            if not link.connected:
                link.connect()
            elif link.address[1] not in self.frozen:
                # Several at once: readers fall behind and catch up.
                for _ in range(chooser.randrange(1, 4)):
                    link.carry_up() if kind == 1 else link.carry_down()

    def calm(self) -> None:
        """Everything is up, connected and delivered."""
        self.frozen.clear()
        for slot in range(self.slots):
            if slot not in self.engines:
                self.start(slot)
        for link in self.links:
            link.connect()
            while link.up:
                link.carry_up()
        for engine in self.engines.values():
            engine.step()
        for link in self.links:
            while link.down:
                link.carry_down()

    def _mend(self) -> None:
        slot = self.chooser.randrange(self.slots)
        self.frozen.discard(slot)
        if slot not in self.engines:
            self.start(slot)

    def _fault(self) -> None:
        chooser = self.chooser
        name = chooser.choice(
            ("kill", "freeze", "cut", "lose frame", "repeat frame", "swap frames", "drain")
        )
        slot = chooser.randrange(self.slots)
        links = [link for link in self.links if link.address[1] == slot and link.connected]
        if name == "kill" and slot in self.engines:
            del self.engines[slot]
            for link in links:
                link.disconnect("killed")
        elif name == "freeze":
            # A router that hears nothing for too long cuts; the engine works on for nobody.
            self.frozen.add(slot)
            for link in links:
                if chooser.random() < 0.5:
                    link.disconnect("silence")
        elif name == "cut":
            for link in links:
                link.disconnect("cut")
        elif name == "drain" and slot in self.engines:
            self.engines[slot].server.drain(undo=self.engines[slot].server.draining)
        else:
            self._damage(name, links)
        self.faults[name] = self.faults.get(name, 0) + 1

    def _damage(self, name: str, links: list[SimLink]) -> None:
        """What TCP rules out, but a bug or a middlebox may do: it must be noticed."""
        for link in links:
            frames = link.down
            if not frames:
                continue
            at = self.chooser.randrange(len(frames))
            if name == "lose frame":
                del frames[at]
            elif name == "repeat frame":
                frames.insert(at, frames[at])
            elif name == "swap frames" and len(frames) > 1:
                other = self.chooser.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
