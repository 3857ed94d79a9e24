"""Measurements on one GPU, against what the card itself can do: `python -m workers.bench_gpu`."""
