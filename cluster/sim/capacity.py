"""Arithmetic on paper: how many users fit, and how fast each of them is served."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.sim.costs.base import StepSize
from cluster.sim.costs.roofline import RooflineCost


def kv_tokens(memory_bytes: float, weight_bytes: float, kv_bytes_per_token: float) -> int:
    """KV positions beside the weights."""
    return int((memory_bytes - weight_bytes) / kv_bytes_per_token)


def decode_size(users: int, context: int) -> StepSize:
    """A decode step of `users` sequences whose caches hold `context` positions, the new one's own
    among them."""
    return StepSize(users, users * context, 2 * users * context)


def users_within(cost: RooflineCost, itl_s: float, context: int) -> int:
    """Most sequences of `context` tokens whose decode step takes at most itl_s; 0 if none."""
    low, high = 0, 1
    while cost.of_size(decode_size(high, context)) <= itl_s:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if cost.of_size(decode_size(middle, context)) <= itl_s:
            low = middle
        else:
            high = middle
    return low


def static_efficiency(lengths: Sequence[int]) -> float:
    """Share of a static batch's decode work that somebody reads: sum(L) / (B max L)."""
    return sum(lengths) / (len(lengths) * max(lengths))
