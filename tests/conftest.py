"""What holds for all tests: no wall time for hypothesis, and the group of those that depend on real time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sockets have deadlines, which a neighbour on the same core could make a hand-off miss."""
    for item in items:
        if item.get_closest_marker("sockets") is not None:
            item.add_marker(pytest.mark.realtime)
