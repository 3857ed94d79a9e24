"""Paged attention: what a step looks like to a kernel, and the kernels that can run it."""
