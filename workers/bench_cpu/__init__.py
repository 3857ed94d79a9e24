"""Ratios of the CPU kernels, of whole steps and of what goes with them."""
