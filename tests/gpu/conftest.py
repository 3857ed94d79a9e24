"""Skips everything here, with the reason, where torch finds no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Is handed the items of all folders."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.skip(reason="torch finds no usable GPU here"))
