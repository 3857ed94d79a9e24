"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Machines are shared: how long an example takes says nothing.
settings.register_profile("headway", deadline=None)
settings.load_profile("headway")
