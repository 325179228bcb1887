"""The plugin's hooks, each a few lines; decisions live in the modules that they call."""

from __future__ import annotations

import pytest

from pytest_fsdp_comm import marker, options
from pytest_fsdp_comm.fixtures import _fsdp_comm_world_size
from pytest_fsdp_comm.ranks.gpus import visible_gpu_count

__all__ = ["_fsdp_comm_world_size"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Registers options and ini values."""
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker and parses the options."""
    config.addinivalue_line(
        "markers",
        f"{options.MARKER_SIGNATURE}: run the test on world_size ranks (an int, or a list of ints "
        "that parametrizes) with gloo, nccl, or simulated with fake.",
    )
    config.stash[options.OPTIONS] = options.read_session_options(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Says what distributed tests without arguments will use."""
    return options.describe(config.stash[options.OPTIONS])


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes over a marker's list of world sizes, as the last part of the test's id."""
    mark = metafunc.definition.get_closest_marker(options.MARKER_NAME)
    sizes = marker.marker_world_sizes(mark) if mark else None
    if sizes:
        metafunc.fixturenames.append(options.WORLD_SIZE_PARAM)
        ids = [f"ws{size}" for size in sizes]
        metafunc.parametrize(options.WORLD_SIZE_PARAM, sizes, indirect=True, ids=ids)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Resolves every selected test's settings; bad markers stop the session before any test."""
    marker.resolve_items(session, items, count_gpus=visible_gpu_count)
