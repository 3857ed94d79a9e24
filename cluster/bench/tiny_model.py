"""A seeded random Llama of a few hundred kilobytes: real steps that take next to nothing."""

from __future__ import annotations

from pathlib import Path

VOCAB = 320


def write_tiny_model(folder: Path, max_len: int) -> Path:
    """In fp32; no tokenizer, ids in and ids out."""
    import torch

    from workers.bench_gpu.randommodel import ModelShape, write_random_model

    shape = ModelShape(
        vocab=VOCAB,
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_len=max_len,
    )
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    write_random_model(folder, shape, torch.float32)
    return folder
