"""``fsdp-comm report`` and ``trace``: pages of HTML, and files for Perfetto."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.command_line.diff import (
    Pair,
    Story,
    pairs_in_directories,
    pairs_of,
    tell,
    test_of,
)
from pytest_fsdp_comm.command_line.documents import read_json, sort_ranks
from pytest_fsdp_comm.command_line.terminal import SAME, print_problems
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.reports.ci.outcomes import read_origin
from pytest_fsdp_comm.reports.html.values import Compared, Record, Result, Run
from pytest_fsdp_comm.reports.trace import dump_trace
from pytest_fsdp_comm.snapshots.differences import kind_of
from pytest_fsdp_comm.snapshots.documents import EXPECTED, RECEIVED, write_report
from pytest_fsdp_comm.text.words import counted


def run_report(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm report``."""
    match options.sides:
        case [directory] if Path(directory, RECEIVED).is_dir():
            # A first recording has nothing that it was compared with.
            sides = [os.path.join(directory, side) for side in (EXPECTED, RECEIVED)]  # noqa: PTH118  # shown as given
            pairs, problems = pairs_in_directories(*sides)
        case [old, new]:
            pairs, problems = pairs_of(old, new)
        case _:
            raise FsdpCommError(
                f"{' '.join(options.sides)}: expected the directory that pytest "
                "--comm-artifacts=DIR left, or two files or directories"
            )
    tests: dict[object, list[tuple[Pair, Story]]] = {}
    for pair, story in zip(pairs, tell(pairs), strict=True):
        tests.setdefault(test_of(pair), []).append((pair, story))
    command = shlex.join(["fsdp-comm", "report", *options.sides])
    output = Path(options.output)
    try:
        origin = read_origin(os.environ)
        results = tuple(map(_result, tests.values()))
        write_report(Run(tests=results, command=command, origin=origin), output)
    except OSError as error:
        raise FsdpCommError(f"cannot write {output} ({error.strerror or error})") from None
    status = print_problems(problems)
    print(f"{output / 'index.html'}: {counted(len(tests), 'test')}")  # noqa: T201  # a program's output
    return status


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
    changes = story.text.story if story.text else ()
    return Compared(
        name="",
        kind=kind_of(pair.newer.profile),
        verdict="missing" if pair.old is None else "differs" if story.differs else "same",
        file=pair.new_path,
        old=str(pair.old or ""),
        new=str(pair.newer),
        text=story.text,
        headline=changes[0].strip() if changes else "",
    )


def run_trace(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm trace``."""
    recordings: list[Recording] = []
    for name in options.files:
        saved = read_json(Path(name), where=name)
        if not isinstance(saved, list):
            raise FsdpCommError(f"{name}: expected a recording, got a tree")
        recordings += saved
    recordings = sort_ranks(recordings, where=", ".join(options.files))
    first = Path(options.files[0])
    output = Path(options.output) if options.output else first.with_suffix(".trace.json")
    try:
        output.write_text(dump_trace(recordings), encoding="utf-8")
    except OSError as problem:
        raise FsdpCommError(f"cannot write {output} ({problem.strerror or problem})") from None
    print(f"{output}: open it at https://ui.perfetto.dev")  # noqa: T201  # a program's output
    return SAME
