"""The engines that a router is connected to, and what they serve."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from cluster.core.modelinfo import ModelInfo
from cluster.fleet.snapshot import EngineCapacity, EngineSnapshot
from cluster.hop.link import EngineLink
from cluster.hop.messages import Forget, Welcome
from cluster.router.active import ActiveStream
from cluster.router.stream import EngineStatus

logger = logging.getLogger(__name__)


class ConnectedEngine:
    """A connected engine and the streams placed on it, by stream id."""

    def __init__(self, link: EngineLink, welcome: Welcome) -> None:
        self.link = link
        self.welcome = welcome
        self.snapshot = EngineSnapshot(
            welcome.engine_id,
            EngineCapacity(
                welcome.max_sequence_len,
                welcome.model.block_size,
                welcome.model.num_blocks,
                welcome.max_num_seqs,
                welcome.max_num_batched_tokens,
            ),
            weights=welcome.model.weights,
        )
        self.streams: dict[int, ActiveStream] = {}
        self.next_stream = 1
        port = welcome.metrics_port
        self.metrics = f"{link.address[0]}:{port}" if port else ""

    def status(self, now: float) -> EngineStatus:
        load = self.snapshot.load
        host = self.link.address[0]
        return EngineStatus(
            engine_id=self.welcome.engine_id,
            address=f"{host}:{self.link.address[1]}",
            epoch=self.welcome.epoch,
            connected=self.link.connected,
            blocks_total=load.blocks_total if load else 0,
            blocks_free=load.blocks_free if load else 0,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            step=load.step if load else 0,
            tokens_per_s=load.tokens_per_s if load else 0.0,
            preemptions=load.preemptions if load else 0,
            frame_age_s=now - self.link.last_frame_s,
            draining=self.snapshot.draining,
            step_s=load.step_s if load else 0.0,
            recomputed_tokens=load.recomputed_tokens if load else 0,
            metrics=self.metrics,
        )


class ConnectedEngines:
    """By connection and by id. tokenizer: engines with another one are not taken, "" takes any.
    model: what the fleet serves, with the longest sequence that any of them takes."""

    def __init__(self, tokenizer: str) -> None:
        self.model: ModelInfo | None = None
        self._tokenizer = tokenizer
        self._by_link: dict[EngineLink, ConnectedEngine] = {}
        self._by_id: dict[str, ConnectedEngine] = {}

    def __len__(self) -> int:
        return len(self._by_link)

    def __iter__(self) -> Iterator[ConnectedEngine]:
        return iter(self._by_link.values())

    @property
    def longest(self) -> int:
        """Prompt + output tokens of one sequence at most, at the engine that takes most."""
        return max((engine.welcome.max_sequence_len for engine in self), default=0)

    def of(self, link: EngineLink) -> ConnectedEngine | None:
        return self._by_link.get(link)

    def named(self, engine_id: str) -> ConnectedEngine | None:
        return self._by_id.get(engine_id)

    def add(self, link: EngineLink, welcome: Welcome) -> ConnectedEngine:
        """One that is not unfit()."""
        if self.model is None or self.model.weights != welcome.model.weights:
            logger.info("the fleet now serves %s", welcome.model.name)
        engine = self._by_link[link] = ConnectedEngine(link, welcome)
        self._by_id[welcome.engine_id] = engine
        self.model = dataclasses.replace(welcome.model, max_model_len=self.longest)
        return engine

    def remove(self, link: EngineLink) -> ConnectedEngine | None:
        return self._by_link.pop(link, None)

    def unname(self, engine: ConnectedEngine) -> bool:
        """Whether the id was still this engine's; one that came back with it keeps it."""
        engine_id = engine.welcome.engine_id
        if self._by_id.get(engine_id) is not engine:
            return False
        del self._by_id[engine_id]
        return True

    def expect(self, model: ModelInfo) -> None:
        """What the fleet serves, for requests that come before the first engine does."""
        if self.model is None and not self.unfit(model):
            self.model = model

    def unfit(self, model: ModelInfo) -> str:
        """Why no stream of this router can run on an engine with this model; "" if it can. Other
        weights are fine, and are how a rolling update looks; another vocabulary is not."""
        if self._tokenizer and model.tokenizer and self._tokenizer != model.tokenizer:
            return f"{model.name} has another tokenizer than this router's model"
        ours = self.model
        if ours is not None and len(self) and ours.vocab_size != model.vocab_size:
            return (
                f"{model.name} has a vocabulary of {model.vocab_size}, "
                f"{ours.name} of {ours.vocab_size}"
            )
        return ""

    def can_hold(self, sequence_len: int) -> bool:
        return any(engine.snapshot.can_hold(sequence_len) for engine in self)

    def forget(self, token: str) -> None:
        """No engine need keep this log."""
        for engine in self:
            engine.link.send(Forget(token))
