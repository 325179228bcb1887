"""What a session did with snapshots, test by test, and which commit it ran on."""

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
    """What one test compared; goes along with its report, from ranks and workers."""

    files: tuple[str, ...] = ()
    """The snapshot files, relative to pytest's root directory; each once."""
    headline: str = ""
    """The difference in one line; empty if nothing differs."""
    story: tuple[str, ...] = ()
    """All of it, without the command that accepts it; empty as above."""
    told: tuple[str, ...] = ()
    """Each change of the whole in a line, regressions first; empty if only modules changed."""
    cost: tuple[str, ...] = ()
    """What the difference costs, the whole first; empty if that is unchanged or not known."""
    sent: tuple[tuple[str, str], ...] = ()
    """Each change whose call site is known, as ``path:line`` and the text of the change."""
    accept: str = ""
    """The command that accepts the difference; empty if none does."""
    test: str = ""
    """The test as a word of that command."""

    @property
    def summary(self) -> str:
        """The first change with the line that sends, but without its cause."""
        text = self.told[0].partition("; likely: ")[0] if self.told else self.headline
        site = next((site for site, told in self.sent if told in self.told[:1]), "")
        return f"{text}, at {site}" if site else text

    @property
    def command(self) -> str:
        """`accept` without the test."""
        return self.accept.removesuffix(self.test)

    def change(self, nodeid: str) -> tuple[str, ...]:
        """What differs, without amounts and what names this test: files, lines of its module."""
        module = re.escape(Path(nodeid.partition("::")[0]).name)
        lines = [line for line in self.story[1:] if not line.startswith((CURE, NOTE))]
        # The cost is amounts, which count where nothing else differs.
        changes = [line for line in lines if not line.endswith(self.cost)] or lines
        site = rf"(?<![^ ,])[^ ,]*\b{module}:\d+"
        return (self.command, *(without_amounts(re.sub(site, "", line)) for line in changes))


def group_changes(tests: Mapping[str, Comparisons]) -> list[list[str]]:
    """Put the node ids of tests together in which the same changed, whatever the amounts."""
    alike: dict[object, list[str]] = {}
    for nodeid, one in tests.items():
        alike.setdefault(one.change(nodeid) if one.accept else nodeid, []).append(nodeid)
    return list(alike.values())


def has_other_amounts(tests: Iterable[Comparisons]) -> bool:
    """Whether what the first of some tests with the same change tells is not true of all."""
    return len({(one.told, one.cost) for one in tests}) > 1


def accept_all(tests: Sequence[Comparisons]) -> str:
    """Join the commands that accept the same change of some tests."""
    return tests[0].command + " ".join(one.test for one in tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of a file in the repository."""

    path: str
    """Relative to the top of the checkout, with ``/``."""
    line: int
    """From 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTest:
    """A test that failed, by a comparison or on its ranks."""

    nodeid: str
    reason: str
    """The headline, or the first line of the error; of a hang the first lines."""
    place: Place | None
    """Where it failed; None if that is outside of the checkout."""
    sent: tuple[tuple[Place, str], ...] = ()
    """The changes of `comparisons.sent`, or where a test hangs, as far as in the checkout."""
    comparisons: Comparisons = Comparisons()
    """Empty if it failed before it compared anything, or for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """All that is reported of a session."""

    compared_tests: int
    """How many tests compared something and passed, or failed by it."""
    compared_files: int
    failed: tuple[FailedTest, ...] = ()
    """In the order in which they were reported."""
    unused: tuple[str, ...] = ()
    """Snapshot files that no test compared, as the user would type each path."""
    ended_early: str = ""
    """Why not all tests ran; empty if all did."""
    annotates_all: bool = True
    """Whether failed comparisons without a known call site are annotated too."""

    @property
    def changes(self) -> list[list[FailedTest]]:
        """The failed tests, together those in which the same changed."""
        tests = {test.nodeid: test for test in self.failed}
        groups = group_changes({nodeid: test.comparisons for nodeid, test in tests.items()})
        return [[tests[nodeid] for nodeid in group] for group in groups]

    @property
    def has_news(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.compared_tests or self.failed or self.unused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is not known is empty."""

    commit: str = ""
    branch: str = ""
    address: str = ""
    """Of the repository's pages."""
    top: str = ""
    """Directory of the checkout."""

    @property
    def commit_address(self) -> str:
        """Where the commit is shown."""
        return f"{self.address}/commit/{quote(self.commit)}" if self.address else ""

    def line_address(self, place: Place | None) -> str:
        """Where a line of the checkout is shown; empty if unknown."""
        if place is None or not self.address:
            return ""
        return f"{self.address}/blob/{quote(self.commit)}/{quote(place.path)}#L{place.line}"

    def place(self, path: Path, line: int, *, root: Path) -> Place | None:
        """Find a line in the checkout, or below `root` if its directory is unknown."""
        top = Path(self.top or root)
        # Links stay where the path as it is lies in the checkout.
        for at, below in ((Path(os.path.abspath(path)), top), (path.resolve(), top.resolve())):  # noqa: PTH100  # see above
            if at.is_relative_to(below):
                return Place(path=at.relative_to(below).as_posix(), line=line)
        return None


def read_origin(environment: Mapping[str, str]) -> Origin:
    """Read what GitHub, or GitLab, sets; nothing in a session that a test runs."""
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
        # Anything else would be a link that runs.
        address=address if commit and address.startswith(("https://", "http://")) else "",
        top=first("GITHUB_WORKSPACE", "CI_PROJECT_DIR"),
    )
