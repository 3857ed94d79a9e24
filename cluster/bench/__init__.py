"""Benchmarks as commands: they measure the classes that serve, beside a peer where there is one."""
