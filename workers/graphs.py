"""Decode steps as CUDA graphs: one launch in place of some hundreds.

A graph is captured once per size and replayed for every later step of that size: it reads its
inputs where they were when it was captured, in the buffers of the InputBuilder. So a step is padded
to the next size; rows that pad read one token of the null block and write nowhere.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from cluster.core.plan import StepPlan
from workers.inputs import InputBuilder, StepInputs
from workers.passes import EagerPasses

logger = logging.getLogger(__name__)

Replay = Callable[[], None]


class Capturer(Protocol):
    """Turns a function that queues work on the device into one that queues the same work again,
    on the same memory."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """`run` may be called several times; what it does is done at least once."""


class CudaCapturer:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        # Once as it is: what is compiled or allocated at first use must not be captured.
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        graph.replay()
        return graph.replay


def graph_sizes(most: int) -> list[int]:
    """Rows for which there is a graph: 1, 2, 4, then multiples of 8, and `most`."""
    sizes = [1, 2, 4, *range(8, most + 1, 8)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Runs steps in which every row decodes as graphs, all others eagerly.

    The attention backend must be graph_safe, and the model alone: a graph holds no collectives.
    """

    def __init__(self, eager: EagerPasses, capturer: Capturer, max_num_seqs: int) -> None:
        self._eager = eager
        self._capturer = capturer
        self._sizes = graph_sizes(max_num_seqs)
        self._replays: dict[int, Replay] = {}
        self._logits: torch.Tensor | None = None
        """[max_num_seqs, vocab]: where every graph puts its result, so that they share it."""

    def prepare(self, inputs: InputBuilder) -> None:
        """Capture every size, the largest first: the others fit into its memory."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self.logits(inputs.blank(size))
        logger.info("captured decode steps of %d sizes up to %d rows", len(self._sizes), size)

    def build(self, inputs: InputBuilder, plan: StepPlan) -> StepInputs:
        rows = plan.rows
        # Padding of a request-level batch, and a chunk of one token, decode nothing.
        if plan.num_decodes == len(rows) and all(row.samples for row in rows):
            size = self._sizes[bisect.bisect_left(self._sizes, len(rows))]
            return inputs.build(plan, at_least=size)
        return inputs.build(plan)

    def logits(self, step: StepInputs) -> torch.Tensor | None:
        if not step.padded:
            return self._eager.logits(step)
        size = step.meta.num_seqs
        replay = self._replays.get(size)
        if replay is None:
            replay = self._replays[size] = self._capture(step)
        else:
            replay()
        return None if self._logits is None else self._logits[:size]

    def _capture(self, step: StepInputs) -> Replay:
        size = step.meta.num_seqs
        if self._logits is None:
            self._logits = self._room(step)
        target = self._logits[:size]

        def run() -> None:
            # With its plan: where that takes work on the device, it is work of every step.
            logits = self._eager.logits(step)
            if logits is None:
                raise RuntimeError("a graph was captured on a rank that has no logits")
            target.copy_(logits)

        return self._capturer.capture(run)

    def _room(self, step: StepInputs) -> torch.Tensor:
        logits = self._eager.logits(step)
        if logits is None:
            raise RuntimeError("a graph was captured on a rank that has no logits")
        return logits.new_empty((self._sizes[-1], logits.shape[1]))
