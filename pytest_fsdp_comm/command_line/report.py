"""``fsdp-comm report``: the stories of ``diff``, or of what CI received, as pages of HTML."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

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
    from pytest_fsdp_comm.command_line.compare import Problems
    from pytest_fsdp_comm.command_line.stories import Pair, Story


def sides_of(arguments: Sequence[str], directory: Path) -> tuple[list[Pair], Problems]:
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


def report(pairs: Sequence[Pair], links: Links, directory: Path, *, command: str) -> int:
    """Writes the pages, one for the files of each test; returns how many there are.

    Raises:
        OSError: Something could not be written.
    """
    tests: dict[object, list[tuple[Pair, Story]]] = {}
    for pair, story in zip(pairs, tell(pairs, links), strict=True):
        tests.setdefault(test_of(pair), []).append((pair, story))
    results = tuple(map(_result, tests.values()))
    write_report(Run(tests=results, command=command), directory)
    return len(results)


def _result(told: Sequence[tuple[Pair, Story]]) -> Result:
    first, _ = told[0]
    path = PurePath(first.new_path)
    return Result(
        nodeid=f"{path.parent}::{path.stem.removesuffix('.tree')}",
        outcome="failed" if any(story.differs for _, story in told) else "passed",
        record=Record(
            world_size=first.newer.profile.world_size,
            compared=tuple(_compared(pair, story) for pair, story in told),
        ),
    )


def _compared(pair: Pair, story: Story) -> Compared:
    return Compared(
        name="",
        kind=kind_of(pair.newer.profile),
        verdict="missing" if pair.old is None else "differs" if story.differs else "same",
        file=pair.new_path,
        old=str(pair.old or ""),
        new=str(pair.newer),
        lines=story.lines,
        headline=story.lines[1].strip() if len(story.lines) > 1 else "",
    )
