"""The lines of a recording's snapshot, for the writer, and for the reader to check itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.snapshots.lines import END, world_lines
from pytest_fsdp_comm.snapshots.records import sort_folded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_fsdp_comm.comm.events import MeshAxis
    from pytest_fsdp_comm.comm.profile import CommRow, RedistributionRow, ReshardRow

COLLECTIVES: Final = 0
RESHARDS: Final = 1
REDISTRIBUTIONS: Final = 2
"""The kinds of records, in the order of their lines within a phase."""

# All that ends a word, or is no text that a file may hold.
_UNSAFE: Final = re.compile("[\\s\\[\\]%\x00-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")
_ESCAPE: Final = re.compile(r"%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
_BYTE: Final = 0xFF


def comm_lines(
    *,
    world_size: int,
    mesh_axes: Iterable[MeshAxis],
    records: Mapping[tuple[Phase, int], Mapping[str, Iterable[str]]],
    totals: Iterable[CommRow],
) -> list[str]:
    """All lines but the first.

    Args:
        world_size: Ranks of the default group.
        mesh_axes: Sorted by name.
        records: Folded names of each content, by phase and kind of record.
        totals: As `CommProfile.totals`, so that a lost line is noticed.
    """
    return [
        *world_lines(world_size, mesh_axes, write_name=write_word),
        *(
            f"{phase} {pattern} {words}"
            for phase in Phase
            for section in (COLLECTIVES, RESHARDS, REDISTRIBUTIONS)
            for pattern, words in sort_folded(records.get((phase, section), {}))
        ),
        *(f"total {collective_content(row)}" for row in totals),
        END,
    ]


def collective_content(row: CommRow) -> str:
    """What a line says of a module's collectives."""
    return f"{write_word(row.kind)}[{write_word(row.axis)}] x{row.count} {row.nbytes:_} B"


def reshard_content(row: ReshardRow) -> str:
    """What a line says of a unit's unshards or reshards."""
    return f"{row.action} x{row.count}"


def redistribution_content(row: RedistributionRow) -> str:
    """What a line says of a module's redistributions."""
    return f"redistribute {write_word(row.change)} x{row.count}"


def write_word(text: str) -> str:
    """Keeps an axis, an operation or placements in one word of a line.

    Not by `text.fqn.escape`, which would rewrite the parentheses and commas of every placement.
    """
    return _UNSAFE.sub(
        lambda match: (
            f"%{ord(match[0]):02X}" if ord(match[0]) <= _BYTE else f"%u{ord(match[0]):04X}"
        ),
        text,
    )


def read_word(text: str) -> str:
    """Reads what `write_word` wrote. The caller checks the text by writing the word again."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), text)
