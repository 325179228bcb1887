"""Puts a report into a directory: an index, and a page for each test."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.reports.html.pages import GENERATOR, render_pages
from pytest_fsdp_comm.reports.html.values import Run
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText
from pytest_fsdp_comm.snapshots.files import write_atomically

# Characters within which a page of ours names its generator.
_HEAD: Final = 400


# Many values of a test have the same text on both sides.
@lru_cache(maxsize=2)
def read_profile(text: str) -> Profile:
    """Read what was recorded, or a snapshot."""
    return SnapshotText(text, where="the recording").profile


def write_report(run: Run, directory: Path) -> None:
    """Write index and pages, or raise OSError; remove pages of an earlier run."""
    tests = directory / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    written = set()
    for name, page in render_pages(run, read_profile):
        write_atomically(directory / name, page)
        written.add(directory / name)
    for path in tests.glob("*.html"):
        if path not in written and _is_ours(path):
            path.unlink()


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as page:
        return GENERATOR in page.read(_HEAD)
