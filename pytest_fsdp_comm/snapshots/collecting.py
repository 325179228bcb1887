"""A plugin for ``fsdp-comm audit`` that writes down what pytest collects, as snapshots name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.snapshots.audit import OUTPUT, Collection
from pytest_fsdp_comm.text.codec import to_json

if TYPE_CHECKING:
    from pytest_fsdp_comm.snapshots.unused_session import UnusedSnapshots


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the file to write."""
    parser.addoption(OUTPUT, metavar="FILE", required=True, help="where the collection goes")


def pytest_configure(config: pytest.Config) -> None:
    """Set ``--snapshot-disable-unused``: syrupy calls all snapshots unused where no test runs."""
    # Not on the command line, where pytest would refuse it without syrupy.
    config.option.disable_unused_snapshots = True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the file."""
    config, option = session.config, session.config.option
    unused: UnusedSnapshots | None = config.pluginmanager.get_plugin("fsdp-comm-unused")
    if unused is None:
        raise pytest.UsageError("fsdp-comm audit: expected the plugin syrupy, which is not loaded")
    collection = Collection(
        snapshot_dir=config.stash[OPTIONS].snapshot_dir,
        anchor=config.stash[OPTIONS].snapshot_anchor,
        modules=unused.collected.modules,
        is_full=not (option.file_or_dir or option.ignore or option.ignore_glob),
    )
    Path(config.getoption(OUTPUT)).write_text(json.dumps(to_json(collection)), encoding="utf-8")
