"""Puts a report into a directory: an index, and a page for each test."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pytest_fsdp_comm.reports.html.pages import render_pages
from pytest_fsdp_comm.reports.html.values import Run
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText
from pytest_fsdp_comm.snapshots.files import write_atomically


# Many values of a test have the same text on both sides.
@lru_cache(maxsize=2)
def read_profile(text: str) -> Profile:
    """Read what was recorded, or a snapshot."""
    return SnapshotText(text, where="the recording").profile


def write_report(run: Run, directory: Path) -> None:
    """Write index and pages over those of an earlier run, or raise OSError."""
    (directory / "tests").mkdir(parents=True, exist_ok=True)
    for name, page in render_pages(run, read_profile):
        write_atomically(directory / name, page)
