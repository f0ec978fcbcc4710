"""The two groups of the suite: `make test` runs what does not depend on real time in two processes, the rest in one."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sockets have deadlines, which a neighbour on the same core could make a hand-off miss."""
    for item in items:
        if item.get_closest_marker("sockets") is not None:
            item.add_marker(pytest.mark.realtime)
