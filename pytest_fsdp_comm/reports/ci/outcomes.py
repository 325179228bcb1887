"""A session's results for reviewers: compared snapshots, failed tests, and the commit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pytest_fsdp_comm.reports.explanation import CURE, NOTE
from pytest_fsdp_comm.text.words import without_amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """The comparisons of one test, which ranks and xdist workers send with the test's report."""

    files: tuple[str, ...] = ()
    """The snapshot files, relative to pytest's root directory, without duplicates."""
    headline: str = ""
    """The difference in one line; empty if nothing differs."""
    explanation: tuple[str, ...] = ()
    """All lines of the failure text except `accept`; empty if nothing differs."""
    summaries: tuple[str, ...] = ()
    """The model-wide changes, one per line, regressions first; empty if there are none."""
    cost: tuple[str, ...] = ()
    """The cost of the difference, total first; empty if the cost is unchanged or unknown."""
    sent: tuple[tuple[str, str], ...] = ()
    """For each change whose call site is known: ``path:line`` and the text of the change."""
    accept: str = ""
    test: str = ""
    """The last word of `accept`, which names the test."""

    @property
    def summary(self) -> str:
        """The first change, with its call site but without its cause."""
        text = self.summaries[0].partition("; likely: ")[0] if self.summaries else self.headline
        site = next((site for site, change in self.sent if change in self.summaries[:1]), "")
        return f"{text}, at {site}" if site else text

    @property
    def command(self) -> str:
        """`accept` without the test, so that `accept_all` can append several tests."""
        return self.accept.removesuffix(self.test)

    def change(self, nodeid: str) -> tuple[str, ...]:
        """Return a key that is equal for tests with the same change, even if its numbers differ."""
        module = re.escape(Path(nodeid.partition("::")[0]).name)
        lines = [line for line in self.explanation[1:] if not line.startswith((CURE, NOTE))]
        # The cost consists only of numbers, so use its lines only if there are no others.
        changes = [line for line in lines if not line.endswith(self.cost)] or lines
        site = rf"(?<![^ ,])[^ ,]*\b{module}:\d+"
        return (self.command, *(without_amounts(re.sub(site, "", line)) for line in changes))


def group_changes(tests: Mapping[str, Comparisons]) -> list[list[str]]:
    """Group the node ids of tests that have the same change, even if its numbers differ."""
    groups: dict[object, list[str]] = {}
    for nodeid, test in tests.items():
        groups.setdefault(test.change(nodeid) if test.accept else nodeid, []).append(nodeid)
    return list(groups.values())


def has_other_amounts(tests: Iterable[Comparisons]) -> bool:
    """Return whether tests with the same change differ in their numbers."""
    return len({(test.summaries, test.cost) for test in tests}) > 1


def accept_all(tests: Sequence[Comparisons]) -> str:
    """Return one command that accepts a change in all tests that have it."""
    return tests[0].command + " ".join(test.test for test in tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    place: Place | None
    """The line that failed; None if it is outside the checkout."""
    sent: tuple[tuple[Place, str], ...] = ()
    """The lines of `comparisons.sent`, or the line that hangs, if they are in the checkout."""
    comparisons: Comparisons = Comparisons()
    """Empty if the test failed before its first comparison, or for an unrelated reason."""


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
    ended_early: str = ""
    """Why the session ended before all tests ran; empty if all of them ran."""
    annotates_all: bool = True
    """Whether to annotate failed comparisons even if their call sites are unknown."""

    @property
    def changes(self) -> list[list[FailedTest]]:
        """The failed tests, grouped by change."""
        tests = {test.nodeid: test for test in self.failed}
        groups = group_changes({nodeid: test.comparisons for nodeid, test in tests.items()})
        return [[tests[nodeid] for nodeid in group] for group in groups]

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
    top: str = ""
    """Directory of the checkout."""

    @property
    def commit_address(self) -> str:
        """The URL of the commit; empty if unknown."""
        return f"{self.address}/commit/{quote(self.commit)}" if self.address else ""

    def line_address(self, place: Place | None) -> str:
        """Return the URL of a line of the checkout; empty if unknown."""
        if place is None or not self.address:
            return ""
        return f"{self.address}/blob/{quote(self.commit)}/{quote(place.path)}#L{place.line}"

    def place(self, path: Path, line: int, *, root: Path) -> Place | None:
        """Return the `Place` of a line, or None if the line is outside the checkout."""
        top = Path(self.top or root)
        # Resolve symlinks only if the unresolved path is not in the checkout.
        for at, below in ((Path(os.path.abspath(path)), top), (path.resolve(), top.resolve())):  # noqa: PTH100  # see above
            if at.is_relative_to(below):
                return Place(path=at.relative_to(below).as_posix(), line=line)
        return None


def read_origin(environment: Mapping[str, str]) -> Origin:
    """Read the commit from GitHub's or GitLab's variables, unless a test started this session."""
    if "PYTEST_CURRENT_TEST" in environment:
        return Origin()

    def first(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    server, repository = first("GITHUB_SERVER_URL"), first("GITHUB_REPOSITORY")
    project, commit = first("CI_PROJECT_URL"), first("GITHUB_SHA", "CI_COMMIT_SHA")
    address = f"{server}/{repository}" if server and repository else project and f"{project}/-"
    return Origin(
        commit=commit,
        branch=first("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
        # A link with a different scheme, such as javascript:, could run code.
        address=address if commit and address.startswith(("https://", "http://")) else "",
        top=first("GITHUB_WORKSPACE", "CI_PROJECT_DIR"),
    )
