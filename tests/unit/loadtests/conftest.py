"""Load tests are an extra; without its packages there is nothing to test."""

from __future__ import annotations

import pytest

pytest.importorskip("hdrh", reason="needs the extra `load`")
