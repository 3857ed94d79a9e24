"""Small host values on their way to the device, without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of `values` on `device`."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    # From memory that is not pinned, the copy would first wait for the step that is running.
    return host.pin_memory().to(device, non_blocking=True)
