"""The interface of an attention backend, its declared capabilities, and their check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from workers.attention.meta import StepMeta
from workers.layers.fused import FusedOps, TorchOps
from workers.layers.rotary import RotaryAngles, rotate
from workers.native.layers import NativeStep


class LayerCache(NamedTuple):
    """One layer's keys and values, [num_blocks + 1, block_size, kv_heads, head_dim] each.

    Block 0 is the null block: padding is written there and it is never read.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model and a configuration ask of a backend. scale: applied to q . k.

    windows: the sliding windows that layers use, in tokens, the query's own included; a layer
    without one is not named. softcap: scores become softcap * tanh(score / softcap); 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int, ...] = ()
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. head_dims: empty means every size.

    dtypes: per device type. block_multiple: block sizes must be a multiple of it.
    windows, softcap: whether AttentionSpec may ask for them. graph_safe: `run` may be captured
    in a CUDA graph and replayed for other steps. batch_invariant: in fp32 a sequence's result
    has the same bits whatever else is in the batch.
    """

    dtypes: dict[str, frozenset[torch.dtype]]
    block_multiple: int = 1
    head_dims: frozenset[int] = frozenset()
    windows: bool = False
    softcap: bool = False
    graph_safe: bool = False
    batch_invariant: bool = False

    def objection(self, spec: AttentionSpec) -> str | None:
        """Why `spec` cannot be served, with limit and value, or None when it can."""
        dtypes = self.dtypes.get(spec.device.type)
        if dtypes is None:
            return f"device must be one of {sorted(self.dtypes)}, got {spec.device.type}"
        if spec.dtype not in dtypes:
            names = sorted(str(d).removeprefix("torch.") for d in dtypes)
            got = str(spec.dtype).removeprefix("torch.")
            return f"dtype on {spec.device.type} must be one of {names}, got {got}"
        if self.head_dims and spec.head_dim not in self.head_dims:
            return f"head size must be one of {sorted(self.head_dims)}, got {spec.head_dim}"
        if spec.block_size % self.block_multiple:
            return f"block_size must be a multiple of {self.block_multiple}, got {spec.block_size}"
        if spec.windows and not self.windows:
            return f"no sliding window, got {list(spec.windows)}"
        if spec.softcap and not self.softcap:
            return f"no soft cap of scores, got {spec.softcap:g}"
        return None


class AttentionBackend(ABC):
    """Causal attention of a mixed batch over a paged cache, and the passes around it.

    One object serves all layers. Per step: `plan` once, then for each layer `rotate_and_write`
    (or `write_kv`) and `run`. Slots that no token of the sequence was written to are never read,
    whatever they hold. ops: the element-wise passes, on the same kernels.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    ops: FusedOps

    def __init__(self, spec: AttentionSpec) -> None:
        """`objection` has nothing against `spec`."""
        self.spec = spec
        self.ops = TorchOps()

    @classmethod
    def objection(cls, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve `spec` on this machine, or None when it can."""
        return cls.capabilities.objection(spec)

    @abstractmethod
    def plan(self, meta: StepMeta) -> None:
        """Adopt the step that the following calls belong to."""

    @abstractmethod
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
        """Store this step's keys and values, [T, kv_heads, head_dim] each, at slot_mapping."""

    def angle_dtype(self) -> torch.dtype:
        """The dtype in which `rotate_and_write` wants its angles."""
        return self.spec.dtype

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, return the queries.

        heads: [T, query | key | value heads, head_dim], contiguous -> [T, heads, head_dim].
        """
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        query_key = rotate(heads[:, :rotated], angles)
        self.write_kv(query_key[:, spec.num_heads :], heads[:, rotated:], cache)
        return query_key[:, : spec.num_heads]

    @abstractmethod
    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, window: int = 0
    ) -> None:
        """Attend query [T, heads, head_dim] to the cache, into `out` of the same shape.

        window: one of spec.windows; the query at position p sees keys (p - window, p]. 0: all.
        """

    def native_step(self) -> NativeStep | None:
        """What compiled layers need of the planned step; None where the backend is not compiled."""
        return None
