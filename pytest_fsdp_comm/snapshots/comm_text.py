"""The text of a communication snapshot: one record per line, for people and for ``git diff``.

::

    # pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
    world_size 4
    mesh dp=4 stride 1
    forward layers.{0..3} all_gather[dp] x1 of 524_288 B float32
    backward layers.{0..3} all_gather[dp] x1 of 524_288 B float32 ahead 1
    backward layers.{0..3} unshard x1
    peak gathered 1_048_576 B
    total all_gather[dp] x8 4_194_304 B
    end

Siblings with equal content share a line, with the numbers of one of them; the bytes after ``of``
are those of each call, and those of a total are all bytes together. No line depends on the width of
another, so that a change touches the lines that changed and no others. A line that not all recorded
ranks share ends with ``ranks 0,2-3``; a line ``ranks 0,2-3`` below the world's size says which were
recorded, if not all were (`text.rank_lists` says how ranks are written). If ranks differ, totals
are sums over all of them and say so: ``total all_gather[dp] x32 16_777_216 B, sum of 4 ranks``.
Below a line ``activation sizes not compared``, calls that carry activations have no bytes, and
totals leave theirs out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS
from pytest_fsdp_comm.snapshots.lines import END, header, world_lines
from pytest_fsdp_comm.snapshots.records import folded_lines, with_ranks
from pytest_fsdp_comm.text.fqn import escape, write_word
from pytest_fsdp_comm.text.rank_lists import write_ranks

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey, Subject, Total

ASYNC_UNKNOWN: Final = "async unknown"
"""The line of a recording in which torch did not say which calls are asynchronous."""
UNSIZED: Final = "activation sizes not compared"
"""The line of a recording whose calls that carry activations have no bytes."""
PEAK: Final = "peak gathered "
TOTAL: Final = "total "
"""The first words of lines that stand below all records."""


def format_profile(profile: CommProfile) -> str:
    """Writes a profile as a snapshot; `comm_reading.read_comm` reads it."""
    first = header("comm", torch_version=profile.torch_version, backend=profile.backend)
    return "\n".join([first, *comm_lines(profile)]) + "\n"


def comm_lines(profile: CommProfile) -> list[str]:
    """All lines of a profile but the first."""
    names_of: defaultdict[tuple[Phase, Subject], defaultdict[str, list[str | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    # Rows share long lists of ranks, and those of siblings their calls: each is written once, and
    # known by its identity, since a tuple is hashed anew each time.
    ranks_of: dict[int, str] = {}
    words_of: dict[tuple[RowKey, int, int], str] = {}
    for row in profile.rows:
        place = (row.key, id(row.calls), id(row.ranks))
        if place not in words_of:
            if id(row.ranks) not in ranks_of:
                ranks_of[id(row.ranks)] = write_ranks(row.ranks)
            words_of[place] = with_ranks(row_content(row), ranks_of[id(row.ranks)])
        names_of[row.phase, row.subject][words_of[place]].append(row.owner)
    return [
        *world_lines(profile.world_size, profile.recorded_ranks, profile.mesh_axes),
        *([] if profile.shows_async else [ASYNC_UNKNOWN]),
        *([] if profile.sizes_activations else [UNSIZED]),
        *(
            f"{phase} {line}"
            for phase in Phase
            for subject in SUBJECTS
            for line in folded_lines(names_of.get((phase, subject), {}))
        ),
        *(with_ranks(f"{PEAK}{one.nbytes:_} B", write_ranks(one.ranks)) for one in profile.peaks),
        # So that a lost line is noticed.
        *map(_total_line, profile.totals()),
        END,
    ]


def row_content(row: Row) -> str:
    """What a line says of a module, without ranks."""
    what = {
        "collective": _kind_and_axis(row.what, row.axis),
        "reshard": row.what,
        "redistribution": f"redistribute {write_word(row.what)}",
    }[row.subject]
    return f"{what} {', '.join(map(str, row.calls))}"


def _total_line(total: Total) -> str:
    of_ranks = f", sum of {total.num_ranks} ranks" if total.num_ranks > 1 else ""
    what = _kind_and_axis(total.kind, total.axis)
    return f"{TOTAL}{what} x{total.count} {total.nbytes:_} B{of_ranks}"


def _kind_and_axis(kind: str, axis: str) -> str:
    # An operation that shows no group has no axis; an empty name is that of the root elsewhere.
    return f"{escape(kind)}[{escape(axis) if axis else ''}]"
