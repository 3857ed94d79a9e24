"""Tensor parallelism: the ranks of one engine, and what they exchange within a step."""
