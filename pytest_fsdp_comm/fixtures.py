"""The fixtures, evaluated in each rank like any other fixture."""

from __future__ import annotations

import pytest


@pytest.fixture
def _fsdp_comm_world_size(request: pytest.FixtureRequest) -> int:
    """The world size of a test whose marker lists several."""
    size: int = request.param
    return size
