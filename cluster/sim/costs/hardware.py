"""What a machine is to a cost model."""

from __future__ import annotations

from dataclasses import dataclass

THIS_CPU = "cpu"
"""The machine that this runs on, measured when it is asked for."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """Dynamic power left for a step, in watts, and the picojoules that a unit of work takes.

    min_scale: lowest clock, as a share of the highest, that the power control goes down to.
    """

    watts: float
    pj_per_flop: float = 1.0
    pj_per_byte: float = 60.0
    min_scale: float = 0.4


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    flops: peak FLOP/s in bf16. bandwidth: peak bytes/s of its memory. memory: bytes. link: bytes/s
    to its peers, host_link to host memory, one direction. flops_share, bandwidth_share: what real
    kernels reach of the peaks. overhead_s: launch and host time of a step. power: None leaves the
    clock alone.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    power: PowerLimit | None = None
    flops_share: float = 0.55
    bandwidth_share: float = 0.80
    overhead_s: float = 0.5e-3
    host_link: float = 25e9

    @property
    def compute_rate(self) -> float:
        return self.flops * self.flops_share

    @property
    def memory_rate(self) -> float:
        return self.bandwidth * self.bandwidth_share
