"""A session's results for reviewers: compared snapshots, failed tests, and the commit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pytest_fsdp_comm.reports.explanation import Failure, failure_sort_key
from pytest_fsdp_comm.text.words import hide_amounts

# Statements that may differ between tests with the same change.
_AMOUNTS: Final = frozenset({"cost", "note"})


def group_changes(failures: Mapping[str, Failure | None]) -> list[list[str]]:
    """Group the node ids of tests that have the same change, even if its numbers differ."""
    groups: dict[object, list[str]] = {}
    for nodeid, failure in failures.items():
        is_accepted = failure is not None and failure.accept and not failure.is_missing
        key = _make_change_key(failure, nodeid) if failure and is_accepted else nodeid
        groups.setdefault(key, []).append(nodeid)
    return list(groups.values())


def _make_change_key(failure: Failure, nodeid: str) -> object:
    """Return a key that is equal for tests with the same change, even if its numbers differ."""
    module = re.escape(Path(nodeid.partition("::")[0]).name)
    site = rf"(?<![^ ,])[^ ,]*\b{module}:\d+"
    lines = [*failure.heads, *(row.line() for row in failure.rows if row.severity not in _AMOUNTS)]
    return (failure.command, *(hide_amounts(re.sub(site, "", line)) for line in lines))


def summarize_group(failure: Failure) -> str:
    """Return the first change of tests that share it, with its call site, without its cause."""
    if not failure.changes:
        return failure.problem
    first = failure.changes[0]
    at = f", at {first.sites[0]}" if first.sites and not first.place else ""
    return f"{first.placed_text}{at}"


def has_other_amounts(failures: Iterable[Failure | None]) -> bool:
    """Return whether tests with the same change differ in their numbers."""
    return len({failure and failure.amounts for failure in failures}) > 1


def make_joint_accept_command(failures: Sequence[Failure]) -> str:
    """Return one command that accepts a change in all tests that have it."""
    return failures[0].command + " ".join(failure.test for failure in failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLine:
    """A line of a file in the repository."""

    path: str
    """The path relative to the top of the checkout, with ``/`` as the separator."""
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTest:
    """A failed test that compares snapshots or runs on ranks."""

    nodeid: str
    reason: str
    """The headline, the first line of the error, or the first lines of the report about a hang."""
    location: FileLine | None
    """The line that failed; None if it is outside the checkout."""
    sent: tuple[tuple[FileLine, str], ...] = ()
    """The lines that issue new calls, or the line that hangs, if they are in the checkout, each
    with a text."""
    failure: Failure | None = None
    """None if the test failed before its first comparison, or for an unrelated reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The results of a session."""

    compared_tests: int
    """Number of tests that compared at least one snapshot."""
    compared_files: int
    failed: tuple[FailedTest, ...] = ()
    """The failed tests, in the order of pytest's reports."""
    unused: tuple[str, ...] = ()
    """Paths of snapshot files that no test compared, relative to pytest's root."""
    artifacts: str = ""
    """The directory of ``--comm-artifacts``, as a user writes it; empty without it."""
    report: str = ""
    """The page of ``--comm-report`` that the user opens first; empty without a report."""
    directory: str = ""
    """Where pytest started, relative to the checkout; empty at its top, or if unknown."""
    ended_early: str = ""
    """Why the session ended before all tests ran; empty if all of them ran."""
    annotates_all: bool = True
    """Whether to annotate failed comparisons even if their call sites are unknown."""

    @property
    def changes(self) -> list[list[FailedTest]]:
        """The failed tests, grouped by change; the worst changes come first."""
        tests = {test.nodeid: test for test in self.failed}
        groups = group_changes({nodeid: test.failure for nodeid, test in tests.items()})
        changes = [[tests[nodeid] for nodeid in group] for group in groups]
        return sorted(changes, key=lambda group: failure_sort_key(group[0].failure))

    @property
    def has_news(self) -> bool:
        """Whether there is anything to report to reviewers."""
        return bool(self.compared_tests or self.failed or self.unused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The commit that a session ran on; unknown values are empty."""

    commit: str = ""
    branch: str = ""
    address: str = ""
    """URL of the repository."""
    run_address: str = ""
    """URL of the page that lists the artifacts of this run."""
    top: str = ""
    """Directory of the checkout."""

    @property
    def commit_address(self) -> str:
        """The URL of the commit; empty if unknown."""
        return f"{self.address}/commit/{_quote_for_url(self.commit)}" if self.address else ""

    def line_address(self, location: FileLine | None) -> str:
        """Return the URL of a line of the checkout; empty if unknown."""
        if location is None or not self.address:
            return ""
        commit, path = _quote_for_url(self.commit), _quote_for_url(location.path)
        return f"{self.address}/blob/{commit}/{path}#L{location.line}"

    def relative_directory(self, path: Path) -> str:
        """Return a directory relative to the checkout; empty at its top, or outside of it."""
        location = self.locate(path, 1, root=path)
        return "" if location is None or location.path == "." else location.path

    def locate(self, path: Path, line: int, *, root: Path) -> FileLine | None:
        """Return the `FileLine` of a line, or None if the line is outside the checkout."""
        top = Path(self.top or root)
        # Resolve symlinks only if the unresolved path is not in the checkout.
        for file, base in ((Path(os.path.abspath(path)), top), (path.resolve(), top.resolve())):  # noqa: PTH100  # see above
            if file.is_relative_to(base):
                return FileLine(path=file.relative_to(base).as_posix(), line=line)
        return None


def _quote_for_url(text: str) -> str:
    # Directories and variables may have bytes that are not UTF-8.
    return quote(os.fsencode(text))


def read_origin(environment: Mapping[str, str]) -> Origin:
    """Read the commit from GitHub's or GitLab's variables, unless a test started this session."""
    if "PYTEST_CURRENT_TEST" in environment:
        return Origin()

    def read_first(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    server, repository = read_first("GITHUB_SERVER_URL"), read_first("GITHUB_REPOSITORY")
    project, commit = read_first("CI_PROJECT_URL"), read_first("GITHUB_SHA", "CI_COMMIT_SHA")
    address = f"{server}/{repository}" if server and repository else project and f"{project}/-"
    # A link with a different scheme, such as javascript:, could run code.
    address = address if commit and address.startswith(("https://", "http://")) else ""
    run, job = (_quote_for_url(read_first(name)) for name in ("GITHUB_RUN_ID", "CI_JOB_ID"))
    run_page = f"jobs/{job}/artifacts/browse" if job else run and f"actions/runs/{run}#artifacts"
    return Origin(
        commit=commit,
        branch=read_first("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
        address=address,
        run_address=f"{address}/{run_page}" if address and run_page else "",
        top=read_first("GITHUB_WORKSPACE", "CI_PROJECT_DIR"),
    )
