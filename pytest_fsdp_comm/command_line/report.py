"""``fsdp-comm report``: the stories of ``diff``, or of what CI received, as pages of HTML."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING, cast

from pytest_fsdp_comm.command_line.compare import pairs_in_directories, pairs_of
from pytest_fsdp_comm.command_line.stories import tell, test_of
from pytest_fsdp_comm.reports.html.values import Compared, Record, Result, Run
from pytest_fsdp_comm.run_report.writing import write_report
from pytest_fsdp_comm.snapshots.artifacts import EXPECTED, RECEIVED
from pytest_fsdp_comm.snapshots.differences import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_fsdp_comm.comm.links import Links
    from pytest_fsdp_comm.command_line.compare import Compared as Sides
    from pytest_fsdp_comm.command_line.documents import Document
    from pytest_fsdp_comm.command_line.stories import Pair, Story
    from pytest_fsdp_comm.reports.html.values import Verdict


def sides_of(arguments: Sequence[str], directory: Path) -> Sides:
    """Finds what to report on.

    Args:
        arguments: What ``pytest --comm-artifacts`` left, or as for ``diff``.
        directory: The working directory.

    Raises:
        FsdpCommError: As for ``diff``.
    """
    if len(arguments) == 1 and (directory / arguments[0] / RECEIVED).is_dir():
        # A first recording has nothing that it was compared with.
        return pairs_in_directories(
            [os.path.join(arguments[0], side) for side in (EXPECTED, RECEIVED)],  # noqa: PTH118  # shown as given
            directory,
        )
    return pairs_of(arguments, directory)


def report(sides: Sides, links: Links, directory: Path, *, command: str) -> int:
    """Writes the pages, one for the files of each test; returns how many there are.

    Raises:
        OSError: Something could not be written.
    """
    tests: dict[object, list[tuple[Pair, Story]]] = {}
    for pair, story in zip(sides.pairs, tell(sides.pairs, links), strict=True):
        tests.setdefault(test_of(pair), []).append((pair, story))
    results = [_result(told) for told in tests.values()]
    write_report(Run(tests=tuple(results), command=command), directory)
    return len(results)


def _result(told: Sequence[tuple[Pair, Story]]) -> Result:
    path = PurePath(told[0][0].new_path)
    compared = tuple(_compared(pair, story) for pair, story in told)
    differs = any(story.differs for _, story in told)
    return Result(
        nodeid=f"{path.parent}::{path.stem.removesuffix('.tree')}",
        outcome="failed" if differs else "passed",
        record=Record(world_size=_there(told[0][0]).profile.world_size, compared=compared),
    )


def _there(pair: Pair) -> Document:
    """The newer side that there is: a pair has one at least."""
    return cast("Document", pair.new or pair.old)


def _compared(pair: Pair, story: Story) -> Compared:
    new = _there(pair)
    verdict: Verdict = "missing" if pair.old is None else "differs" if story.differs else "same"
    return Compared(
        name="",
        kind=kind_of(new.profile),
        verdict=verdict,
        file=pair.new_path,
        old=str(pair.old.text) if pair.old else "",
        new=str(new.text),
        lines=story.lines,
        headline=story.lines[1].strip() if len(story.lines) > 1 else "",
    )
