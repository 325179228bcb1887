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
from typing import TYPE_CHECKING

from pytest_fsdp_comm.snapshots.comm_reading import CommDocument
from pytest_fsdp_comm.snapshots.comm_writing import comm_lines, limit_lines, row_content
from pytest_fsdp_comm.snapshots.lines import SnapshotLines, header, world_lines
from pytest_fsdp_comm.snapshots.records import fold_names, with_ranks
from pytest_fsdp_comm.text.rank_lists import write_ranks

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.events import Phase
    from pytest_fsdp_comm.comm.profile import CommProfile, Subject


def format_profile(profile: CommProfile) -> str:
    """Writes a profile as a snapshot; `parse_profile` reads it."""
    names_of: defaultdict[tuple[Phase, Subject], defaultdict[str, list[str | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    written = _RankTexts()
    for row in profile.rows:
        words = with_ranks(row_content(row), written[row.ranks])
        names_of[row.phase, row.subject][words].append(row.owner)
    lines = comm_lines(
        world=[
            *world_lines(profile.world_size, profile.recorded_ranks, profile.mesh_axes),
            *limit_lines(
                shows_async=profile.shows_async, sizes_activations=profile.sizes_activations
            ),
        ],
        records={place: fold_names(contents) for place, contents in names_of.items()},
        peaks=[(peak.nbytes, written[peak.ranks]) for peak in profile.peaks],
        totals=profile.totals(),
    )
    first = header("comm", torch_version=profile.torch_version, backend=profile.backend)
    return "\n".join([first, *lines]) + "\n"


class _RankTexts(dict[tuple[int, ...], str]):
    """Lists of ranks as they are written. Each is written once: rows share long ones."""

    def __missing__(self, ranks: tuple[int, ...]) -> str:
        self[ranks] = text = write_ranks(ranks)
        return text


def parse_profile(text: str, *, where: str = "snapshot") -> CommProfile:
    """Reads what `format_profile` wrote.

    Args:
        text: The whole file.
        where: The file's path, for errors.

    Raises:
        SnapshotFormatError: A line is not as `format_profile` writes it; the text says which.
    """
    return CommDocument(SnapshotLines(text, where=where, kind="comm")).profile()
