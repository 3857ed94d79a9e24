"""The executors of one process with what their forward passes give, seen from outside."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from cluster.core.config import WorkerConfig
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from workers.executors import make_executor
from workers.inputs import StepInputs
from workers.passes import EagerPasses


@dataclass(frozen=True)
class Seen:
    """tokens: of each request. logits: of every step, in order, as the first rank had them."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


def drive_ranks(config: WorkerConfig, size: int, driving: Driving, requests: list[Request]) -> Seen:
    """Run the requests on `size` ranks, which are threads."""
    seen: defaultdict[EagerPasses, list[torch.Tensor | None]] = defaultdict(list)
    plain = EagerPasses.logits

    def recording(passes: EagerPasses, step: StepInputs) -> torch.Tensor | None:
        logits = plain(passes, step)
        seen[passes].append(logits)
        return logits

    executor = make_executor(replace(config, tensor_parallel_size=size, collectives="local"))
    try:
        with patch.object(EagerPasses, "logits", recording):
            tokens = PlanDriver(executor, driving).run(requests)
    finally:
        executor.close()
    assert len(seen) == size
    first, *others = sorted(seen.values(), key=lambda logits: logits[0] is None)
    assert all(logits is None for other in others for logits in other)
    return Seen(tokens, [logits for logits in first if logits is not None])
