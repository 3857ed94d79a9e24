"""A simulated experiment: what to run, put together from names, refused in words if impossible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError
from cluster.core.policies import PolicyChoice
from cluster.engine.core import SURVEY_PERIOD_S, EngineCore
from cluster.sim.coast import CoastingCore, CoastingScheduler
from cluster.sim.costs.base import StepCost
from cluster.sim.costs.hardware import Hardware
from cluster.sim.costs.presets import ModelShape, find_hardware, find_model
from cluster.sim.costs.roofline import RooflineCost, StepWork, check_tensor_parallel
from cluster.sim.engine import SimEngine, Slowdown
from cluster.sim.fleetchoice import FleetChoice
from cluster.sim.metrics import Meter, Objectives, Summary
from cluster.sim.simulation import Observer, Simulation
from cluster.sim.workload import SimRequest, Synthetic

MAX_ENGINES = 4096
MAX_POOL_TOKENS = 1 << 28
"""Of all engines together; the block pools are real lists."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What an engine runs on: hardware, model, and how many accelerators share the model."""

    hardware: Hardware
    model: ModelShape
    tensor_parallel: int = 1

    @classmethod
    def named(cls, hardware: str, model: str, tensor_parallel: int = 1) -> Machine:
        machine = cls(find_hardware(hardware), find_model(model), tensor_parallel)
        check_tensor_parallel(machine.model, tensor_parallel)
        return machine

    def cost(self, block_size: int = 16) -> RooflineCost:
        work = StepWork.of(self.model, self.tensor_parallel)
        return RooflineCost(self.hardware, work, block_size)

    def kv_tokens(self) -> int:
        """Positions that fit beside the weights. Raises ConfigError when the weights do not."""
        free = self.hardware.memory * self.tensor_parallel - self.model.weight_bytes
        if free <= 0:
            raise ConfigError(
                f"{self.model.name} has {self.model.weight_bytes / 1e9:.1f} GB of weights, "
                f"{self.tensor_parallel} x {self.hardware.name} has "
                f"{self.hardware.memory * self.tensor_parallel / 1e9:.1f} GB of memory"
            )
        return int(free / self.model.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """One engine's configuration; every engine of an experiment has the same.

    budget: tokens per step, or the most that a learning budget gives. kv_tokens: size of the pool.
    """

    budget: int
    max_num_seqs: int
    kv_tokens: int
    block_size: int = 16
    watermark: float = 0.02
    max_model_len: int = 1 << 17
    policies: PolicyChoice = field(default_factory=PolicyChoice)

    def config(self) -> SchedulerConfig:
        """The scheduler's own configuration. Raises ConfigError with the limit and the value."""
        if self.kv_tokens < self.block_size:
            raise ConfigError(
                f"kv_tokens must hold a block of {self.block_size} tokens, got {self.kv_tokens}"
            )
        batching = self.policies.batching
        if batching != "chunked" and self.budget < self.block_size:
            raise ConfigError(
                f"budget must be at least block_size ({self.block_size}) with policy {batching}, "
                f"got {self.budget}"
            )
        return SchedulerConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            num_blocks=self.kv_tokens // self.block_size,
            max_model_len=self.max_model_len,
            watermark=self.watermark,
        )

    def scheduler(self) -> CoastingScheduler:
        policies = self.policies.build(
            batch_size=self.max_num_seqs, block_size=self.block_size, max_tokens=self.budget
        )
        return CoastingScheduler(self.config(), policies)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A workload, engines of one kind, and what a step costs on them."""

    setup: EngineSetup
    cost: StepCost
    workload: Iterable[SimRequest]
    engines: int = 1
    objectives: Objectives = field(default_factory=Objectives)
    slowdown: Slowdown | None = None
    fleet: FleetChoice = field(default_factory=FleetChoice)

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= MAX_ENGINES:
            raise ConfigError(f"engines must be between 1 and {MAX_ENGINES}, got {self.engines}")
        if self.setup.kv_tokens * self.engines > MAX_POOL_TOKENS:
            raise ConfigError(
                f"{self.engines} engines x {self.setup.kv_tokens} KV tokens are more than the "
                f"{MAX_POOL_TOKENS} that a simulation keeps books of"
            )
        self.setup.scheduler()

    def run(
        self,
        progress: Callable[[int], None] | None = None,
        observer: Observer | None = None,
        *,
        meter: Meter | None = None,
        coasting: bool = True,
    ) -> Summary:
        """Runs it from the start, each time alike. coasting: take stretches of like steps at once,
        which gives the same times (sim.coast); an observed run takes every step by itself."""
        meter = meter or Meter(self.objectives)
        # A survey costs more than a step's books, and only such fleets look at it.
        survey_s = SURVEY_PERIOD_S if self.fleet.reacts else math.inf
        engines = [
            SimEngine(
                f"engine-{i:04d}",
                (CoastingCore if coasting else EngineCore)(self.setup.scheduler(), survey_s),
                self.cost,
                self.slowdown,
            )
            for i in range(self.engines)
        ]
        simulation = Simulation(engines, self.workload, meter, self.fleet, observer)
        summary = simulation.run(progress)
        if not summary.requests:
            limit = self.setup.config().max_sequence_len
            raise ConfigError(
                f"none of the {summary.refused} requests fits: kv_tokens and max_model_len allow "
                f"sequences of {limit} tokens"
            )
        return summary


ITL_BUDGET = "itl"
"""The budget that learns step times and holds an ITL objective (core.controller)."""
LEARNED_MAX_TOKENS = 8192
"""The most that it may give."""

SWEEPABLE: dict[str, Callable[[str], Any]] = {
    "budget": lambda text: parse_budget(text),
    "max_num_seqs": int,
    "kv_tokens": int,
    "block_size": int,
    "watermark": float,
    "engines": int,
    "policy": str,
    "rate": float,
}


def with_budget(setup: EngineSetup, budget: int | str) -> EngineSetup:
    """budget: tokens per step, or ITL_BUDGET for the one that learns."""
    if isinstance(budget, str):
        return replace(
            setup, budget=LEARNED_MAX_TOKENS, policies=replace(setup.policies, budget=ITL_BUDGET)
        )
    return replace(setup, budget=budget, policies=replace(setup.policies, budget="fixed"))


def parse_budget(text: str) -> int | str:
    """A number of tokens, or "itl". Raises ValueError."""
    return ITL_BUDGET if text.strip().lower() == ITL_BUDGET else int(text)


def vary(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with one thing changed; names are those of SWEEPABLE."""
    if name == "engines":
        return replace(experiment, engines=value)
    setup = experiment.setup
    if name == "policy":
        policies = replace(setup.policies, batching=value)
        return replace(experiment, setup=replace(setup, policies=policies))
    if name == "budget":
        return replace(experiment, setup=with_budget(setup, value))
    if name == "rate":
        if not isinstance(experiment.workload, Synthetic):
            raise ConfigError("rate is a synthetic workload's; a trace has --rate-scale")
        return replace(experiment, workload=replace(experiment.workload, rate=value))
    return replace(experiment, setup=replace(setup, **{name: value}))


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """ "budget=64,128" as the name and its values. Raises ConfigError."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kind = SWEEPABLE.get(name)
    if not equals or kind is None:
        raise ConfigError(f"--sweep takes NAME=VALUE,... with one of {', '.join(SWEEPABLE)}")
    parsed: list[Any] = []
    for value in values.split(","):
        try:
            parsed.append(kind(value.strip()))
        except ValueError:
            raise ConfigError(f"--sweep {name}: {value.strip()!r} is not a value for it") from None
        if kind is float and not math.isfinite(parsed[-1]):
            raise ConfigError(f"--sweep {name}: {value.strip()!r} is not finite")
    return name, parsed
