"""Configure the tests of this project."""

from __future__ import annotations

from typing import Any

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one worker, because some share one long session."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # only under xdist

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None
