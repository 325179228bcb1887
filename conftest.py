"""Configure the tests of this project."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Give distributed tests more time on a busy machine."""
    if config.getoption("--comm-timeout") is None:
        config.option.comm_timeout = extend_under_load(120)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one worker, because some share one long session."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  # only under xdist

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None
