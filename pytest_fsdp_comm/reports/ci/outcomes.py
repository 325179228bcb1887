"""What a session did with snapshots, test by test."""

from __future__ import annotations

from dataclasses import dataclass


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
    accept: str = ""
    """The command that accepts the difference; empty if none does."""


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
    """In one line: the headline, or the first line of the error."""
    place: Place | None
    """Where it failed; None if that is outside of the checkout."""
    comparisons: Comparisons = Comparisons()
    """Empty if it failed before it compared anything, or for another reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFile:
    """A snapshot file that no test needs."""

    shown: str
    """As the user would type it."""
    reason: str
    place: Place | None
    """None if it is outside of the checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What a summary and annotations say about a session."""

    compared_tests: int
    """How many tests compared something and passed, or failed by it."""
    compared_files: int
    failed: tuple[FailedTest, ...] = ()
    """In the order in which they were reported."""
    unused: tuple[UnusedFile, ...] = ()
    are_removed: bool = False
    fails_for_unused: bool = False
    ended_early: str = ""
    """Why not all tests ran; empty if all did."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.compared_tests or self.failed or self.unused)
