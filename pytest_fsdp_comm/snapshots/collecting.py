"""A plugin for ``fsdp-comm audit``, which runs pytest with ``-p`` and this module's name.

It writes down what is collected, with the names that snapshots have.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.snapshots.audit import OUTPUT, CollectedTest, Collection, dump_collection
from pytest_fsdp_comm.snapshots.names import written_module, written_test

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_DESELECTED: Final = pytest.StashKey[list[pytest.Item]]()
_SKIPPED: Final = pytest.StashKey[list[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Registers the file to write."""
    parser.addoption(OUTPUT, metavar="FILE", required=True, help="where the collection goes")


def pytest_configure(config: pytest.Config) -> None:
    """Starts with nothing collected."""
    config.stash[_DESELECTED] = []
    config.stash[_SKIPPED] = []


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Notes tests that are there, but were not chosen."""
    for item in items:
        item.config.stash[_DESELECTED].append(item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Notes modules that are skipped whole, for want of a GPU, say."""
    report = yield
    if isinstance(collector, pytest.Module) and report.skipped:
        collector.config.stash[_SKIPPED].append(collector.path)
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Writes the file."""
    config = session.config
    options, option = config.stash[OPTIONS], config.option

    def place(path: Path) -> str:
        return str(written_module(path, options.snapshot_anchor))

    tests = [(item, snapshot_variant(item)) for item in session.items]
    # Markers of deselected tests were not resolved.
    tests += [(item, "") for item in config.stash[_DESELECTED]]
    collection = Collection(
        snapshot_dir=options.snapshot_dir,
        anchor=options.snapshot_anchor,
        tests=tuple(
            CollectedTest(
                place=place(item.path),
                name=written_test(snapshot_test_name(item)),
                variant=variant,
            )
            for item, variant in tests
        ),
        unknown=tuple(place(path) for path in config.stash[_SKIPPED]),
        is_full=not (option.file_or_dir or option.ignore or option.ignore_glob),
    )
    Path(config.getoption(OUTPUT)).write_text(dump_collection(collection), encoding="utf-8")
