"""Benchmarks as commands. They measure the classes that serve, and print ratios where there is a peer."""
