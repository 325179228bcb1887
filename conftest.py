"""How this project's own tests run."""

from __future__ import annotations

from typing import Any

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps a file's tests in one worker: some share one long session, which would run in each."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # only under xdist

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None
