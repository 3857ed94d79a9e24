"""How much is measured: on a card in under eight minutes, on a CPU only that it can be."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cluster.core.config import WorkerConfig, blocks_for
from workers.attention.backend import AttentionSpec
from workers.bench_gpu.kernels import Batch, KernelSuite
from workers.bench_gpu.randommodel import ModelShape
from workers.bench_gpu.steps import StepSuite


@dataclass(frozen=True, slots=True)
class Suite:
    """Everything that one run measures. dtype: of the model and of attention.

    executors: what a step is measured with, by what is compared: fields of WorkerConfig.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: KernelSuite
    model: ModelShape
    steps: StepSuite
    block_size: int = 16
    executors: dict[str, dict[str, object]] = field(
        default_factory=lambda: {
            "as served": {},
            "without CUDA graphs": {"decode_graphs": "off"},
            "torch attention": {"attention_backend": "torch"},
        }
    )

    def config(self, folder: str, changes: dict[str, object]) -> WorkerConfig:
        """Of a worker for `folder`, with cache for every scenario and room for a whole prompt."""
        steps = self.steps
        base: dict[str, object] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "block_size": self.block_size,
            "num_blocks": blocks_for(steps.cache_tokens, self.block_size) + 2 * steps.most_seqs,
            "max_num_batched_tokens": max(steps.prompt + steps.running, steps.context),
            "max_num_seqs": steps.most_seqs,
        }
        return WorkerConfig(folder, **{**base, **changes})  # type: ignore[arg-type]


def card_suite(layers: int) -> Suite:
    """For one GPU with 40 GiB or more. layers: of the 8B shape, fewer for a smaller card."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    model = ModelShape(layers=layers)
    kernels = KernelSuite(
        AttentionSpec(32, 8, 128, 16, 128**-0.5, dtype, device),
        decodes=(Batch(1, 1, 16384), Batch(16, 1, 1024), Batch(64, 1, 4096), Batch(256, 1, 1024)),
        prefills=(Batch(1, 4096, 0), Batch(1, 512, 8192), Batch(8, 1024, 0)),
        copy_bytes=1 << 30,
        product_size=8192,
        rounds=20,
    )
    steps = StepSuite((1, 8, 32, 128), 1024, 50, 16, 8192, 6, 40, 512)
    return Suite(device, dtype, kernels, model, steps)


def dry_suite() -> Suite:
    """Tiny and on the CPU: the figures mean nothing, but every line of the benchmark runs."""
    device, dtype = torch.device("cpu"), torch.float32
    model = ModelShape(256, 64, 96, 2, 4, 2, 16, 512)
    kernels = KernelSuite(
        AttentionSpec(4, 2, 16, 16, 0.25, dtype, device),
        decodes=(Batch(2, 1, 40),),
        prefills=(Batch(1, 20, 10),),
        copy_bytes=1 << 16,
        product_size=64,
        rounds=2,
    )
    return Suite(device, dtype, kernels, model, StepSuite((1, 2), 40, 4, 2, 100, 2, 3, 32))
