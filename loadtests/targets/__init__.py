"""Servers that a load can be sent to."""
