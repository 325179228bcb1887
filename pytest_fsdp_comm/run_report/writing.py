"""Puts a report into a directory: an index, and a page for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.reports.html.pages import GENERATOR, Site
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_fsdp_comm.reports.html.values import Run
    from pytest_fsdp_comm.snapshots.documents import Profile

_TESTS: Final = "tests"
_HEAD: Final = 400
"""Characters within which a page of ours names its generator."""


def write_report(run: Run, directory: Path) -> None:
    """Writes ``index.html`` and ``tests/*.html``, and removes pages of an earlier run.

    Raises:
        OSError: Something could not be written.
    """
    site = Site(run, _read)
    pages = directory / _TESTS
    pages.mkdir(parents=True, exist_ok=True)
    written = set()
    for name, page in site.test_pages():
        write_atomically(pages / name, page)
        written.add(name)
    write_atomically(directory / "index.html", site.index_page())
    for path in pages.glob("*.html"):
        if path.name not in written and _is_ours(path):
            path.unlink()


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as page:
        return GENERATOR in page.read(_HEAD)


def _read(text: str) -> Profile:
    return SnapshotText(text, where="the recording").profile
