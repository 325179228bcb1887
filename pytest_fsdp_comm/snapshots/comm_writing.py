"""The lines of a recording's snapshot, for the writer, and for the reader to check itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS
from pytest_fsdp_comm.snapshots.lines import END
from pytest_fsdp_comm.snapshots.records import sort_folded, with_ranks
from pytest_fsdp_comm.text.fqn import escape, write_word

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.comm.profile import Row, Subject, Total

ASYNC_UNKNOWN: Final = "async unknown"
"""The line of a recording in which torch did not say which calls are asynchronous."""
UNSIZED: Final = "activation sizes not compared"
"""The line of a recording whose calls that carry activations have no bytes."""
PEAK: Final = "peak gathered "
TOTAL: Final = "total "
"""The first words of lines that stand below all records."""


def limit_lines(*, shows_async: bool, sizes_activations: bool) -> list[str]:
    """The lines that say what is not compared; arguments as fields of `CommProfile`."""
    return [
        *([] if shows_async else [ASYNC_UNKNOWN]),
        *([] if sizes_activations else [UNSIZED]),
    ]


def comm_lines(
    *,
    world: Sequence[str],
    records: Mapping[tuple[Phase, Subject], Mapping[str, Iterable[str]]],
    peaks: Iterable[tuple[int, str]],
    totals: Iterable[Total],
) -> list[str]:
    """All lines but the first.

    Args:
        world: As `lines.world_lines`, then as `limit_lines`.
        records: Folded names of each content, by phase and subject.
        peaks: Bytes of each `GatheredPeak`, and its ranks as they are written.
        totals: As `CommProfile.totals`, so that a lost line is noticed.
    """
    return [
        *world,
        *(
            f"{phase} {pattern} {words}"
            for phase in Phase
            for subject in SUBJECTS
            for pattern, words in sort_folded(records.get((phase, subject), {}))
        ),
        *(with_ranks(f"{PEAK}{nbytes:_} B", ranks) for nbytes, ranks in peaks),
        *map(_total_line, totals),
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
