"""Shows one document for reading: totals, peak, then each phase and its modules."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import show_mesh
from pytest_fsdp_comm.comm.profile import CommProfile, Total
from pytest_fsdp_comm.command_line.documents import read_document
from pytest_fsdp_comm.command_line.terminal import SAME, print_lines
from pytest_fsdp_comm.reports.html.tables import cost_rows
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import counted, itemsize, show_nbytes
from pytest_fsdp_comm.tree.profile import TreeProfile

_PHASES: Final = tuple(map(str, Phase))
_LAST: Final = ("bytes in all", "peak gathered")
_FRAME: Final = ("world_size ", "mesh ", "total ")
_MADE: Final = re.compile(r" \| (.+?)(?: \(not compared\))?$")
"""What a snapshot was recorded with, in its first line."""
_AMOUNT: Final = re.compile(r"[0-9.]+( [KMGTP]?i?B)?")


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm show``."""
    texts = {name: read_document(Path(name)) for name in options.files}
    for number, (name, text) in enumerate(texts.items()):
        several = [*([""] if number else []), f"{name}:"] if len(texts) > 1 else []
        print_lines(several)
        if isinstance(text.profile, CommProfile):
            print_lines(_show_comm(text, text.profile))
        else:
            print_lines(_show_tree(text, text.profile))
    profiles = [
        (Path(name).name, text.profile)
        for name, text in texts.items()
        if isinstance(text.profile, CommProfile)
    ]
    if len(profiles) > 1:
        print_lines(["", "side by side, of one rank", *_side_by_side(profiles)])
    return SAME


def _side_by_side(profiles: Sequence[tuple[str, CommProfile]]) -> Iterator[str]:
    """Show calls, bytes and peak of the rank that sends most, with a column for each file."""
    columns = [
        {row.label: row.after for row in cost_rows(cost_of_change(profile, profile))}
        for _, profile in profiles
    ]
    labels = sorted(dict.fromkeys(chain(*columns)), key=lambda label: label in _LAST)
    rows = [(label, *(column.get(label, "-") for column in columns)) for label in labels]
    return _columns([("", *(name for name, _ in profiles)), *rows])


def _head(what: str, text: SnapshotText) -> str:
    profile = text.profile
    recorded = profile.recorded_ranks
    only = f", recorded on {name_ranks(recorded)}" if recorded else ""
    made = _MADE.search(text.partition("\n")[0])
    by = f" ({made[1]})" if made else ""
    return f"{what} of {counted(profile.world_size, 'rank')}{only}{by}"


def _show_comm(text: SnapshotText, profile: CommProfile) -> Iterator[str]:
    yield _head("communication", text)
    yield f"mesh: {show_mesh(profile.mesh_axes)}"
    for peak in profile.peaks:
        on = f" on {name_ranks(peak.ranks)}" if peak.ranks else ""
        # As textconv of git it must not hide a change that rounding does.
        yield f"peak gathered: {show_nbytes(peak.nbytes)} ({peak.nbytes:_} B){on}"
    if not profile.sizes_activations:
        yield "sizes of activations: not compared"
    for one in profile.answers:
        yield f"answered {one.value} to {one.site} ({one.how})"
    totals = sorted(profile.totals(), key=lambda total: total.axis)
    if totals:
        yield ""
        num_ranks = totals[0].num_ranks
        of = "each rank" if num_ranks == 1 else f"{num_ranks} ranks together, which differ"
        yield f"calls and bytes of {of}"
        yield from _columns(_totals(totals))
    records = [line for line in text.splitlines() if line.partition(" ")[0] in _PHASES]
    for phase, lines in groupby(records, key=lambda line: line.partition(" ")[0]):
        yield ""
        yield phase
        yield from _columns(
            (name, content)
            for name, _, content in (line.split(" ", 1)[1].partition(" ") for line in lines)
        )
    for note in profile.notes:
        yield f"note: {note}"


def _totals(totals: Sequence[Total]) -> Iterator[Sequence[str]]:
    for axis, group in groupby(totals, key=lambda total: total.axis):
        alike = list(group)
        count, nbytes, unsized = (
            sum(getattr(total, name) for total in alike) for name in ("count", "nbytes", "unsized")
        )
        yield (axis, f"{count}", show_nbytes(nbytes, unsized))
        for total in alike:
            yield (f"  {total.kind}", f"{total.count}", show_nbytes(total.nbytes, total.unsized))


def _columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align columns, numbers to the right, the last one open."""
    table = [tuple(row) for row in rows]
    if not table:
        return
    # The last cell of a row is open: no other one has to be as wide.
    widths = [
        max((len(row[place]) for row in table if place < len(row) - 1), default=0)
        for place in range(max(map(len, table)))
    ]
    for row in table:
        cells = [
            cell.rjust(width) if _AMOUNT.fullmatch(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=False)
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _show_tree(text: SnapshotText, profile: TreeProfile) -> Iterator[str]:
    yield _head("sharded model", text)
    tree = profile.common
    if tree is None:
        yield f"{len(profile.trees)} different trees"
    else:
        yield f"mesh: {show_mesh(tree.mesh_axes)}"
        units = sum(map(len, tree.units.values()))
        held = [(math.prod(one.shape), itemsize(one.dtype)) for one in tree.parameters.values()]
        numel = sum(count for count, _ in held)
        nbytes = show_nbytes(sum(count * size for count, size in held))
        parameters = counted(len(held), "parameter")
        yield f"{counted(units, 'unit')}; {parameters} of {numel:_} elements, {nbytes}"
    yield ""
    # All but the first line, what was said above, and the last line.
    yield from (line for line in text.splitlines()[1:-1] if not line.startswith(_FRAME))
