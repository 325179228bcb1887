"""Format and read the snapshot of a recording: one row per line, for review with ``git diff``."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Final

from pytest_fsdp_comm.comm.calls import CALL_WORDS, Calls
from pytest_fsdp_comm.comm.events import Answer, Phase, Role
from pytest_fsdp_comm.comm.profile import (
    SUBJECTS,
    CommProfile,
    GatheredPeak,
    Row,
    Subject,
    Total,
    sort_rows,
)
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import (
    END,
    NUMBER,
    RANKS,
    SnapshotLines,
    append_ranks,
    folded_lines,
    header,
    read_world,
    world_lines,
)
from pytest_fsdp_comm.text.fqn import NO_MODULE, escape, expand, read_word, unescape, write_word
from pytest_fsdp_comm.text.rank_lists import RANKS_PATTERN, write_ranks

# The snapshot of a recording looks like this:
#
#     # pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
#     world_size 4
#     mesh dp=4 stride 1
#     forward layers.{0..3} all_gather[dp] x1 of 524_288 B float32
#     backward layers.{0..3} all_gather[dp] x1 of 524_288 B float32 ahead 1
#     backward layers.{0..3} unshard x1
#     peak gathered 1_048_576 B
#     total all_gather[dp] x8 4_194_304 B
#     end
#
# Siblings with equal content share a line, whose count is per sibling. After ``of`` come the bytes
# of one call; a total has the bytes of all calls. Columns are not aligned, so that a change
# to one line does not touch other lines. A line that applies to only some of the recorded ranks
# ends with ``ranks 0,2-3``. If only some ranks were recorded, a line below ``world_size`` lists
# them. If ranks differ, totals are sums over ranks: ``total all_gather[dp] x32 16_777_216 B, sum of
# 4 ranks``. ``answered 1.0 to train:step (item)`` means that a simulated rank returned the assumed
# value 1.0 to ``item`` in ``step`` of ``train``.

# Marks a recording made with a torch version that does not report which calls are asynchronous.
_ASYNC_UNKNOWN: Final = "async unknown"
# Marks a recording that shows which calls are exposed, and where the host waits.
_OVERLAP_KNOWN: Final = "overlap known"
# Marks a recording that omits the bytes of calls that carry activations. Totals still count these
# calls.
_UNSIZED: Final = "activation sizes not compared"
_FLAGS: Final = frozenset({_ASYNC_UNKNOWN, _OVERLAP_KNOWN, _UNSIZED})
_PEAK: Final = "peak gathered "
_ANSWER: Final = "answered "
_TOTAL: Final = "total "

_NBYTES: Final = r"(?P<nbytes>[0-9_]{1,23}) B"
_OF_RANKS: Final = rf"(?: {RANKS}(?P<ranks>{RANKS_PATTERN}))?"
_RECORD: Final = re.compile(
    rf"(?P<phase>{'|'.join(Phase)}) (?P<names>[^ ]+) "
    r"(?:(?P<kind>[^ \[]+)\[(?P<axis>[^ ]*)\] (?P<calls>x.+?)|"
    rf"(?:(?P<action>unshard|reshard)|redistribute (?P<change>[^ ]+)|"
    rf"host_wait (?P<way>[^ ]+)) x(?P<count>{NUMBER}))"
    rf"{_OF_RANKS}"
)
_ROLES: Final = "|".join(Role)
_NO_DTYPE: Final = rf"(?:{'|'.join(word.name for word in CALL_WORDS.values())}|{_ROLES})(?![^ ,])"
_CALLS: Final = re.compile(
    rf"x(?P<count>{NUMBER})"
    rf"(?: of(?: (?P<objects>objects)| {_NBYTES})?"
    rf"(?: (?!{_NO_DTYPE})(?P<dtype>[^ ,]+))?)?"
    rf"(?: (?P<role>{_ROLES}))?"
    + "".join(
        f"(?: {word.pattern.replace('(', f'(?P<{name}>', 1)})?" for name, word in CALL_WORDS.items()
    )
)
_ANSWER_LINE: Final = re.compile(rf"{_ANSWER}(?P<value>\S+) to (?P<site>\S+) \((?P<how>\S+)\)")
_PEAK_LINE: Final = re.compile(rf"{_PEAK}{_NBYTES}{_OF_RANKS}")


def format_profile(profile: CommProfile) -> str:
    """Return a profile as the text of a snapshot that `read_comm` can read."""
    first = header("comm", torch_version=profile.torch_version, backend=profile.backend)
    return "\n".join([first, *_list_lines_below_header(profile)]) + "\n"


def _list_lines_below_header(profile: CommProfile) -> list[str]:
    """Return all lines of a snapshot except the first."""
    names_of: defaultdict[tuple[Phase, Subject], defaultdict[str, list[str | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    written = cache(write_ranks)  # many rows share a long list of ranks
    for row in profile.rows:
        content = append_ranks(_format_row(row), written(row.ranks))
        names_of[row.phase, row.subject][content].append(row.owner)
    return [
        *world_lines(profile.world_size, profile.recorded_ranks, profile.mesh_axes),
        *([] if profile.shows_async else [_ASYNC_UNKNOWN]),
        *([_OVERLAP_KNOWN] if profile.shows_overlap else []),
        *([] if profile.sizes_activations else [_UNSIZED]),
        *map(_format_answer, profile.answers),
        *(
            f"{phase} {line}"
            for phase in Phase
            for subject in SUBJECTS
            for line in folded_lines(names_of[phase, subject])
        ),
        *map(_format_peak, profile.peaks),
        # Totals let `read_comm` detect that a merge lost a line.
        *map(_format_total, profile.totals()),
        END,
    ]


def _format_peak(peak: GatheredPeak) -> str:
    return append_ranks(f"{_PEAK}{peak.nbytes:_} B", write_ranks(peak.ranks))


def _format_answer(answer: Answer) -> str:
    value, site, how = map(write_word, (answer.value, answer.site, answer.how))
    return f"{_ANSWER}{value} to {site} ({how})"


def _format_row(row: Row) -> str:
    operation = {
        "collective": _format_kind_and_axis(row.what, row.axis),
        "reshard": row.what,
        "redistribution": f"redistribute {write_word(row.what)}",
        "host_wait": f"host_wait {write_word(row.what)}",
    }[row.subject]
    return f"{operation} {', '.join(map(str, row.calls))}"


def _format_total(total: Total) -> str:
    of_ranks = f", sum of {total.num_ranks} ranks" if total.num_ranks > 1 else ""
    operation = _format_kind_and_axis(total.kind, total.axis)
    size = f"{total.nbytes:_} B"
    if total.unsized:
        some = f"{size} and {total.unsized} of unknown size"
        size = some if total.unsized < total.count else "of unknown size"
    return f"{_TOTAL}{operation} x{total.count} {size}{of_ranks}"


def _format_kind_and_axis(kind: str, axis: str) -> str:
    # An operation whose process group is unknown has an empty axis. Do not escape it, because
    # `escape` would write "" as the root module.
    return f"{escape(kind)}[{escape(axis) if axis else ''}]"


def read_comm(lines: SnapshotLines) -> CommProfile:
    """Read the snapshot of a recording (see Note [Strict reading])."""
    world = read_world(lines)
    ranks_of = cache(world.read_ranks)  # many rows share a long list of ranks
    axes, used = {axis.name for axis in world.mesh_axes}, set[str]()
    flags = set[str]()
    answers: list[Answer] = []
    rows: list[Row] = []
    peaks: list[GatheredPeak] = []
    for number, line in enumerate(lines.lines[world.end - 1 : -1], start=world.end):
        with lines.locate_errors(number):
            if line.startswith(_TOTAL):
                break
            if line in _FLAGS:
                flags.add(line)
            elif match := _ANSWER_LINE.fullmatch(line):
                words = {name: read_word(text) for name, text in match.groupdict().items()}
                answers.append(Answer(**words))
            elif match := _PEAK_LINE.fullmatch(line):
                ranks = ranks_of(match["ranks"] or "")
                peaks.append(GatheredPeak(nbytes=_read_nbytes(match), ranks=ranks))
            elif match := _RECORD.fullmatch(line):
                ranks = ranks_of(match["ranks"] or "")
                row = _read_row(match, ranks, sizes_activations=_UNSIZED not in flags)
                if _OVERLAP_KNOWN not in flags:
                    _check_has_no_overlap(row)
                used.add(row.axis)
                if row.axis and row.axis not in axes:
                    raise ValueError("expected an axis that has a 'mesh' line above")
                pattern = match["names"]
                names = (None,) if pattern == NO_MODULE else expand(pattern)
                rows += [replace(row, owner=name) for name in names]
            else:
                raise ValueError(
                    "expected something like '<phase> <module> <collective>[<axis>] x<count> of "
                    f"<bytes> B <dtype>', with one of the phases {', '.join(Phase)}"
                )
    profile = CommProfile(
        world_size=world.size,
        mesh_axes=tuple(axis for axis in world.mesh_axes if axis.name in used),
        rows=sort_rows(rows),
        peaks=tuple(peaks),
        recorded_ranks=world.ranks,
        shows_async=_ASYNC_UNKNOWN not in flags,
        shows_overlap=_OVERLAP_KNOWN in flags,
        sizes_activations=_UNSIZED not in flags,
        answers=tuple(sorted({*answers})),
        torch_version=lines.torch_version,
    )
    lines.check(_list_lines_below_header(profile))
    return profile


def _check_has_no_overlap(row: Row) -> None:
    """Raise ValueError if the row shows overlap, which is known only for simulated ranks."""
    if row.subject == "host_wait" or any(calls.exposed for calls in row.calls):
        raise ValueError(
            f"expected a line {_OVERLAP_KNOWN!r} above, without which a snapshot has neither "
            "'exposed' nor 'host_wait'"
        )


def _read_row(match: re.Match[str], ranks: tuple[int, ...], *, sizes_activations: bool) -> Row:
    phase = Phase(match["phase"])
    if match["kind"] is None:
        subjects: dict[str, Subject] = {
            "action": "reshard",
            "change": "redistribution",
            "way": "host_wait",
        }
        group = next(group for group in subjects if match[group])
        return Row(
            subject=subjects[group],
            phase=phase,
            owner=None,
            what=read_word(match[group]),
            calls=(Calls(count=int(match["count"])),),
            ranks=ranks,
        )
    calls = _read_calls(match["calls"], sizes_activations=sizes_activations)
    axis = unescape(match["axis"]) if match["axis"] else ""
    return Row(
        phase=phase, owner=None, what=unescape(match["kind"]), axis=axis, calls=calls, ranks=ranks
    )


def _read_calls(text: str, *, sizes_activations: bool) -> tuple[Calls, ...]:
    calls: list[Calls] = []
    for part in text.split(", "):
        match = _CALLS.fullmatch(part)
        is_unsized = (
            match is not None
            and not sizes_activations
            and match["role"] == Role.ACTIVATIONS
            and not match["objects"]
        )
        if match is None:
            raise ValueError(
                f"bad calls {quoted_part(part)}: expected something like 'x2 of 64 B float32 "
                "parameters', then optionally 'ahead 1', 'async', 'peer +1', 'root 0', 'by max' or "
                "'exposed'"
            )
        words = {name: word for name, word in CALL_WORDS.items() if match[name] is not None}
        calls.append(
            Calls(
                nbytes=_read_nbytes(match) if match["nbytes"] and not is_unsized else 0,
                dtype=read_word(match["dtype"] or ""),
                role=match["role"] or "",
                is_object=match["objects"] is not None,
                is_unsized=is_unsized,
                count=int(match["count"]),
                **{name: word.read(match[name]) for name, word in words.items()},
            )
        )
    return tuple(sorted(calls))


def _read_nbytes(match: re.Match[str]) -> int:
    return int(match["nbytes"].replace("_", "") or "0")
