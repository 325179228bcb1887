"""What pages are made from: what the tests of a run compared and recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

from pytest_fsdp_comm.reports.ci.outcomes import Origin
from pytest_fsdp_comm.reports.html.timeline import Timeline
from pytest_fsdp_comm.reports.tree_rows import TreeRow, summary_words, tree_rows
from pytest_fsdp_comm.tree.finding import Finding

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.model import ShardTree

Verdict = Literal["differs", "broken", "missing", "updated", "same", "uncompared"]
Outcome = Literal["failed", "error", "passed", "skipped", "xfailed", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """How a model is sharded, ready to be drawn."""

    title: str
    """The root's class."""
    summary: str
    rows: tuple[TreeRow, ...]
    """Parents first."""
    left_out: int = 0
    """Rows beyond those that are kept."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, tree: ShardTree, most: int) -> TreeView:
        """View a tree with at most `most` rows."""
        rows = tree_rows(tree)
        return cls(
            title=tree.modules[0].class_name,
            summary=summary_words(tree),
            rows=tuple(islice(rows, most)),
            left_out=sum(1 for _ in rows),
            findings=tuple(tree.findings),
            notes=tree.notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A value that a test compared with a snapshot, or recorded without."""

    name: str
    """The value's, where a dict was compared; empty otherwise."""
    kind: Literal["comm", "tree"]
    verdict: Verdict
    file: str = ""
    """The snapshot's path, as the user would type it; empty if none was compared."""
    old: str = ""
    """The snapshot's text; empty if there is none."""
    new: str = ""
    """What was recorded, as a snapshot's text; empty if it could not be written."""
    lines: tuple[str, ...] = ()
    """Why it failed, all of it; empty if it did not."""
    headline: str = ""
    tree: TreeView | None = None
    """Of the lowest rank; None for a recording."""
    timelines: tuple[Timeline, ...] = ()
    """By their lowest rank; empty for a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a test compared and recorded, as far as it came."""

    world_size: int = 1
    backend: str = ""
    """Empty for a test that does not run on ranks."""
    silent_ranks: tuple[int, ...] = ()
    """Those that ended without saying what they recorded, ascending."""
    compared: tuple[Compared, ...] = ()
    """In the order of the comparisons, then what was not compared."""
    left_out: int = 0
    """Later comparisons that are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a test."""

    nodeid: str
    outcome: Outcome
    seconds: float = 0.0
    problem: str = ""
    """The report of its failure, perhaps without the beginning; empty if it did not fail."""
    message: str = ""
    address: str = ""
    """Where the hosting service shows the test; empty if unknown."""
    record: Record = Record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a report is about."""

    tests: tuple[Result, ...]
    """Those that use this plugin, in the order in which they ended."""
    others: int = 0
    """How many other tests ran."""
    is_interrupted: bool = False
    command: str = ""
    made_at: str = ""
    """Date and time, as they are shown."""
    origin: Origin = field(default_factory=Origin)
