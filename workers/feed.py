"""Sampled ids on their ways: on the device to the next step, and to the host in their own time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.inputs import StepInputs
from workers.models.base import Batch


class TokenFeed:
    """The newest id sampled for every lane, on the device, where the next step finds it before any
    host has read it. Steps run in order, so an id is there before who needs it; what an earlier
    sequence left in a lane is not looked at, since a newcomer's ids are known."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        self._newest = torch.zeros(lanes, dtype=torch.int32, device=device)

    def take(self, step: StepInputs, token_ids: torch.Tensor) -> None:
        """Keep what was sampled: [rows that sample], any integer type, negative where one failed
        (its sequence is over, and what its next row computes is passed over)."""
        newest = token_ids.clamp(min=0).to(torch.int32)
        self._newest.index_copy_(0, step.sampled.to(torch.int64), newest)

    def fill(self, step: StepInputs) -> Batch:
        """The step's batch with every id in its place."""
        if not step.unread:
            return step.batch
        written = step.batch.token_ids
        newest = self._newest.index_select(0, step.token_lanes)
        return step.batch._replace(token_ids=torch.where(written < 0, newest, written))


def start_reading(token_ids: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy ids to the host; what is returned waits for them. The steps that are queued on
    the device meanwhile are not waited for."""
    if token_ids.device.type != "cuda":
        return token_ids.tolist
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read
