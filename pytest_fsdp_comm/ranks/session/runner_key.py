"""Where a session's runner is found; apart from the runner, which most sessions need not load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.session.runner import RankRunner

RUNNER: Final[pytest.StashKey[RankRunner]] = pytest.StashKey()
"""On the config's stash, from the start of the run loop on: runs the distributed tests."""
