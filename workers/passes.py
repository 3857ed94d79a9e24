"""How a step's forward pass is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.core.plan import StepPlan
from workers.attention.backend import AttentionBackend, LayerCache
from workers.feed import TokenFeed
from workers.inputs import InputBuilder, StepInputs
from workers.models.base import Model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything a step runs on."""

    model: Model
    attention: AttentionBackend
    caches: list[LayerCache]


class Passes(Protocol):
    """Lays steps out the way it runs them."""

    def build(self, inputs: InputBuilder, plan: StepPlan) -> StepInputs:
        """Raises what InputBuilder.build raises."""

    def logits(self, step: StepInputs) -> torch.Tensor | None:
        """Of the rows that sample, and then of scored prompts: [rows or more, vocab], valid until
        the next step is run; None on all ranks of a group but the first. In inference mode."""


class EagerPasses:
    """Every operator is launched by itself."""

    def __init__(self, loaded: LoadedModel, feed: TokenFeed) -> None:
        self._loaded = loaded
        self._feed = feed

    def build(self, inputs: InputBuilder, plan: StepPlan) -> StepInputs:
        return inputs.build(plan)

    def logits(self, step: StepInputs) -> torch.Tensor | None:
        model, attention, caches = (
            self._loaded.model,
            self._loaded.attention,
            self._loaded.caches,
        )
        batch = self._feed.fill(step)
        attention.plan(step.meta)
        return model.forward(batch, attention, caches)
