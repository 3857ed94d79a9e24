"""Executors and clocks that stand in for a GPU, around the same scheduler and engine code."""
