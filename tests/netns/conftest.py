"""Hosts in namespaces need root and some Debian packages: only where they were asked for."""

from __future__ import annotations

import os

import pytest

ASKED = "HEADWAY_TEST_CLUSTER"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(ASKED):
        return
    skip = pytest.mark.skip(reason="needs root and four hosts: make test-cluster")
    for item in items:
        if "netns" in item.path.parts:
            item.add_marker(skip)
