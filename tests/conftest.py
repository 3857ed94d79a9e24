"""Settings of the whole suite."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

# Machines are shared: how long an example takes says nothing.
settings.register_profile("headway", deadline=None)
settings.load_profile("headway")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Locust patches the process it is imported into, and grpc.aio then waits for ever."""
    if "gevent" in sys.modules:
        raise pytest.UsageError(
            "a test module has imported gevent (through locust?); run it in a process of its own"
        )
