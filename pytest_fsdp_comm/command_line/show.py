"""``fsdp-comm show``: print the totals, peak, phases and modules of a file in columns."""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import show_mesh
from pytest_fsdp_comm.comm.profile import CommProfile, Row, Total
from pytest_fsdp_comm.command_line.documents import read_document
from pytest_fsdp_comm.command_line.terminal import SAME, print_lines
from pytest_fsdp_comm.reports.html.tables import cost_rows
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import itemsize, show_count, show_nbytes, show_nbytes_of
from pytest_fsdp_comm.tree.profile import TreeProfile

_PHASES: Final = tuple(map(str, Phase))
_LAST: Final = ("bytes in all", "peak gathered")
_FRAME: Final = ("world_size ", "mesh ", "total ")
_VERSIONS: Final = re.compile(r" \| (.+?)(?: \(not compared\))?$")
"""Matches the torch version and backend in the first line of a snapshot."""
_AMOUNT: Final = re.compile(r"[0-9.]+( [KMGTP]?i?B)?")


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm show``."""
    texts = {name: read_document(Path(name)) for name in options.files}
    for number, (name, text) in enumerate(texts.items()):
        heading = [*([""] if number else []), f"{name}:"] if len(texts) > 1 else []
        print_lines(heading)
        if isinstance(text.profile, CommProfile):
            print_lines(_format_comm(text, text.profile))
        else:
            print_lines(_format_tree(text, text.profile))
    profiles = [
        (Path(name).name, text.profile)
        for name, text in texts.items()
        if isinstance(text.profile, CommProfile)
    ]
    if len(profiles) > 1:
        print_lines(
            ["", "side by side, one rank of each file", *_make_side_by_side_table(profiles)]
        )
    return SAME


def _make_side_by_side_table(profiles: Sequence[tuple[str, CommProfile]]) -> Iterator[str]:
    """Return a table with a column per file: the calls, bytes and peak of its busiest rank."""
    columns = [
        {row.label: row.after for row in cost_rows(cost_of_change(profile, profile))}
        for _, profile in profiles
    ]
    labels = sorted(dict.fromkeys(chain(*columns)), key=lambda label: label in _LAST)
    rows = [(label, *(column.get(label, "-") for column in columns)) for label in labels]
    return _align_columns([("", *(name for name, _ in profiles)), *rows])


def _make_heading(subject: str, text: SnapshotText) -> str:
    profile = text.profile
    recorded = profile.recorded_ranks
    only = f", recorded on {name_ranks(recorded)}" if recorded else ""
    versions = _VERSIONS.search(text.partition("\n")[0])
    recorded_with = f" ({versions[1]})" if versions else ""
    return f"{subject} of {show_count(profile.world_size, 'rank')}{only}{recorded_with}"


def _format_comm(text: SnapshotText, profile: CommProfile) -> Iterator[str]:
    if profile.divergence is not None:
        yield str(profile.divergence)
    yield _make_heading("communication", text)
    yield f"mesh: {show_mesh(profile.mesh_axes)}"
    for peak in profile.peaks:
        on = f", on {name_ranks(peak.ranks)}" if peak.ranks else ""
        # Also print the exact bytes, so that small changes show up in a diff of git's textconv.
        yield f"peak gathered: {show_nbytes(peak.nbytes)} ({peak.nbytes:_} B){on}"
    if not profile.sizes_activations:
        yield "sizes of activations: not compared"
    for answer in profile.answers:
        yield f"answered {answer.value} to {answer.site} ({answer.how})"
    totals = sorted(profile.totals(), key=lambda total: total.axis)
    if totals:
        yield ""
        num_ranks = totals[0].num_ranks
        scope = "each rank" if num_ranks == 1 else f"all {num_ranks} ranks together (they differ)"
        yield f"calls and bytes of {scope}"
        yield from _align_columns(_make_total_rows(totals))
        yield from _format_exposed_bytes(totals)
    waits = [row for row in profile.rows if row.subject == "host_wait"]
    if waits:
        yield ""
        yield "the host waits"
        yield from _align_columns(_make_host_wait_rows(waits))
    records = [line for line in text.splitlines() if line.partition(" ")[0] in _PHASES]
    for phase, lines in groupby(records, key=lambda line: line.partition(" ")[0]):
        yield ""
        yield phase
        yield from _align_columns(
            (name, content)
            for name, _, content in (line.split(" ", 1)[1].partition(" ") for line in lines)
        )
    for note in profile.notes:
        yield f"note: {note}"


def _make_total_rows(totals: Sequence[Total]) -> Iterator[Sequence[str]]:
    for axis, group in groupby(totals, key=lambda total: total.axis):
        of_axis = list(group)
        count, nbytes, unsized = (
            sum(getattr(total, name) for total in of_axis)
            for name in ("count", "nbytes", "unsized")
        )
        yield (axis, f"{count}", show_nbytes(nbytes, unsized))
        for total in of_axis:
            yield (f"  {total.kind}", f"{total.count}", show_nbytes(total.nbytes, total.unsized))


def _format_exposed_bytes(totals: Sequence[Total]) -> Iterator[str]:
    for total in totals:
        if total.exposed_nbytes:
            part = show_nbytes_of(total.exposed_nbytes, total.nbytes)
            yield f"exposed: {total.kind}[{total.axis}] {part}"


def _make_host_wait_rows(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    owners_of: defaultdict[tuple[str, str, str, str], list[str | None]] = defaultdict(list)
    for row in rows:
        lines = dict.fromkeys(site.call_site for site in row.sites if site.call_site)
        where = f", at {', '.join(lines)}" if lines else ""
        on = f", on {name_ranks(row.ranks)}" if row.ranks else ""
        owners_of[row.phase, row.what, f"x{row.count}", on + where].append(row.owner)
    for (phase, way, count, where), owners in owners_of.items():
        each = " each" if len(owners) > 1 else ""
        yield (phase, name_owners(owners), way, f"{count}{each}{where}")


def _align_columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Align numbers to the right and text to the left; do not pad the last cell of a row."""
    table = [tuple(row) for row in rows]
    if not table:
        return
    # Ignore the last cell of each row, which needs no padding because no cell follows it.
    widths = [
        max((len(row[column]) for row in table if column < len(row) - 1), default=0)
        for column in range(max(map(len, table)))
    ]
    for row in table:
        cells = [
            cell.rjust(width) if _AMOUNT.fullmatch(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=False)
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _format_tree(text: SnapshotText, profile: TreeProfile) -> Iterator[str]:
    yield _make_heading("sharded model", text)
    tree = profile.common
    if tree is None:
        yield f"{len(profile.trees)} different trees"
    else:
        yield f"mesh: {show_mesh(tree.mesh_axes)}"
        units = sum(map(len, tree.units.values()))
        sizes = [
            (math.prod(parameter.shape), itemsize(parameter.dtype))
            for parameter in tree.parameters.values()
        ]
        numel = sum(count for count, _ in sizes)
        nbytes = show_nbytes(sum(count * size for count, size in sizes))
        parameters = show_count(len(sizes), "parameter")
        yield f"{show_count(units, 'unit')}; {parameters} of {numel:_} elements, {nbytes}"
    yield ""
    # Skip the first and last lines, and all lines that the output above already summarizes.
    yield from (line for line in text.splitlines()[1:-1] if not line.startswith(_FRAME))
