"""Describe changes in recordings and trees."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import Change, Comparison, NewCalls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import NO_BACKWARD
from pytest_fsdp_comm.comm.explanation.causes import Cause
from pytest_fsdp_comm.comm.explanation.evidence import NORM
from pytest_fsdp_comm.comm.explanation.names import Renamed
from pytest_fsdp_comm.comm.explanation.overlap import ExposureChange, Waits
from pytest_fsdp_comm.comm.explanation.states import count_calls, nbytes_of
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step
from pytest_fsdp_comm.comm.explanation.timing import TimingChange
from pytest_fsdp_comm.comm.explanation.training import TrainingChange
from pytest_fsdp_comm.comm.explanation.words import name_modules, name_with_phase
from pytest_fsdp_comm.comm.profile import Row
from pytest_fsdp_comm.reports.cost_lines import cost_lines
from pytest_fsdp_comm.reports.explanation import Failure, Severity, Statement
from pytest_fsdp_comm.text.fqn import expand, name_containers, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import (
    itemsize,
    join_first,
    show_count,
    show_nbytes,
    show_nbytes_change,
)
from pytest_fsdp_comm.tree.diff import TreeChange, reverse_addition

_MAX_CALLS: Final = 3
_MAX_RANK_SETS: Final = 3
_MAX_LINES: Final = 3
_MAX_SUBJECTS: Final = 3
# Matches the name of an axis: the `dp` of ``dp=4 stride 2``.
_AXIS_NAME: Final = re.compile(r"[^,\s=]+(?==)")
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD})


def render_comparison(
    comparison: Comparison, *, snapshot: str = "", notes: Sequence[str] = ()
) -> Failure:
    """Explain a failed comparison of recordings, most important change first."""
    cost = cost_lines(comparison.cost)
    # Do not list the peak again if the cost lines already report it.
    repeated = "memory" if any("peak gathered" in line for line in cost) else ""
    rows = [change for change in comparison.remaining if change.subject != repeated]
    main, rest = _make_main_and_remaining_statements(comparison, sorted(rows, key=change_sort_key))
    if repeated and not main:
        more = "more" if comparison.cost.peak_after > comparison.cost.peak_before else "fewer"
        text = f"all calls unchanged, but {more} parameters are gathered at the same time"
        main = [Statement(severity="change", text=text)]
    causes = [_make_cause_statement(cause, comparison) for cause in comparison.causes]
    if len(main) == 1:
        main = [replace(main[0], causes=tuple(cause.text for cause in causes))]
    return Failure(
        head=f"comm_mode differs from {snapshot}",
        compared="comm_mode",
        snapshot=snapshot,
        statements=(
            *main,
            *causes,
            *(Statement(severity="cost", text=line) for line in cost),
            *(replace(statement, severity="rest") for statement in rest),
            *(Statement(severity="note", text=note) for note in notes),
        ),
    )


def _make_main_and_remaining_statements(
    comparison: Comparison, rows: Sequence[Change]
) -> tuple[list[Statement], list[Statement]]:
    """Return the main changes, which precede causes and costs, and the rest."""
    steps = [*_make_step_statements(comparison)]
    described = [
        (joined[0], _make_joint_row_statement(joined, comparison))
        for joined in _group_changes_ignoring_sizes(rows)
    ]
    frames, reshards = (
        [statement for row, statement in described if row.subject == subject]
        for subject in ("frame", "reshard")
    )
    others = [entry for row, entry in described if row.subject not in {"frame", "reshard"}]
    user_calls = [
        (row, entry)
        for row, entry in described
        if _is_change_of_user_calls(row) and not (steps and _is_change_of_norms(row, comparison))
    ]
    # Other collectives are the change, and what they expose is their effect. A barrier sends
    # nothing; it is one of the waits.
    sending = [
        entry
        for row, entry in sorted(described, key=lambda pair: not _is_change_of_user_calls(pair[0]))
        if row.subject == "collective" and not (steps or row.what.startswith("barrier"))
    ]
    exposures = [*_make_exposure_statements(comparison)]
    waits = [*_make_host_wait_statements(comparison)]
    late = [*_make_timing_statements(comparison)]
    # Changes in prefetching are more likely the change than waits that expose nothing.
    effects = [*sending, *exposures, *(late if waits else ()), *waits]
    # A row that no step explains may change the most bytes.
    sent = [change for change in comparison.changes if change.subject == "collective"]
    most = max((abs(_compute_nbytes_growth(change)) for change in sent), default=0)
    steps[1:1] = [
        entry
        for row, entry in described
        if steps and row.subject == "collective" and abs(_compute_nbytes_growth(row)) == most > 0
    ]
    # Other sizes or layouts of the mesh say more than the steps that follow from them.
    is_mesh_first = any(map(_is_frame_change_beyond_names, comparison.changes))
    first = [*frames, *steps, *effects] if is_mesh_first else [*steps, *effects, *frames]
    # Changes in units precede changes in timing, which result from them.
    second = [entry for entry in (*others, *late) if entry not in effects]
    main = first or second or reshards
    # Steps do not cover these collectives. Those between pipeline stages follow from the schedule.
    promoted = [entry for row, entry in user_calls if not row.what.startswith(("send", "recv"))]
    if comparison.causes and not (steps or frames or promoted):
        # Rows and exposed calls are details of a cause, so it comes second.
        main = main[:1]
    main = [*main, *(entry for entry in promoted if entry not in main)]
    rest = [entry for entry in (*first, *second, *reshards) if entry not in main]
    return _add_call_sites(main, rest, comparison), rest


def render_tree_changes(changes: Sequence[TreeChange], *, snapshot: str = "") -> Failure:
    """Explain a failed comparison of trees, most important change first."""
    whats: defaultdict[tuple[str, str, bool], list[TreeChange]] = defaultdict(list)
    for change in changes:
        whats[change.subject, change.noun, change.breaks_training].append(change)
    # Subjects with the same changes share a statement.
    subjects: defaultdict[tuple[str, str, bool], list[str]] = defaultdict(list)
    causes: defaultdict[tuple[str, str, bool], dict[str, None]] = defaultdict(dict)
    for (subject, noun, breaks), listed in whats.items():
        text_key = ", ".join(change.what for change in listed), noun, breaks
        subjects[text_key].append(subject)
        causes[text_key] |= {change.likely: None for change in listed if change.likely}
    statements = []
    # Parameters that replace others share a statement with them.
    replaced = {
        (what, noun, breaks): removed
        for what, noun, breaks in subjects
        for removed in [(reverse_addition(what), noun, breaks)]
        if removed in subjects
    }
    for text_key, names in subjects.items():
        if text_key in replaced.values():
            continue
        what, noun, breaks = text_key
        severity: Severity = "breaks training" if breaks else "change"
        text = f"{_name_tree_subjects(names, noun)}: {what}"
        if text_key in replaced:
            text = f"{_name_tree_subjects(subjects[replaced[text_key]], noun)}: removed; {text}"
        statements.append(
            Statement(severity=severity, text=text, causes=tuple(causes[what, noun, breaks]))
        )
    likely = dict.fromkeys(change.likely for change in changes if change.likely)
    return Failure(
        head=f"fsdp_tree differs from {snapshot}",
        compared="fsdp_tree",
        snapshot=snapshot,
        statements=(*statements, *(Statement(severity="likely", text=text) for text in likely)),
    )


def _compute_nbytes_growth(change: Change) -> int:
    """Return how many bytes more all modules send."""
    return (nbytes_of(change.after) - nbytes_of(change.before)) * len(change.owners)


def _is_change_of_user_calls(change: Change) -> bool:
    """Whether collectives changed other than those of units, gradients and activations.

    Collectives of activations count if all of them are new, or none is left.
    """
    is_whole = not (change.before and change.after)
    roles = {call.role for row in (*change.before, *change.after) for call in row.calls}
    return change.subject == "collective" and roles <= {"", Role.ACTIVATIONS if is_whole else ""}


def _is_change_of_norms(change: Change, comparison: Comparison) -> bool:
    """Whether as many calls as before send the norms of more or fewer DTensors."""
    is_sum = change.owners == (None,) and change.what.startswith("all_reduce")
    is_same_count = count_calls(change.before) == count_calls(change.after)
    return (
        is_sum
        and is_same_count
        and any(key.phase is change.phase and NORM in key.what for _, key in comparison.recorded)
    )


def _is_frame_change_beyond_names(change: Change) -> bool:
    """Whether a change affects the mesh, ranks or sizes of a run, not only names of axes."""
    old, new = (_AXIS_NAME.sub("", text) for text in (change.old_text, change.new_text))
    return change.subject == "frame" and old != new


def _name_tree_subjects(patterns: Sequence[str], noun: str) -> str:
    """Name up to 3 subjects of a tree; if there are more, name the modules that contain them."""
    if len(patterns) <= _MAX_SUBJECTS:
        return ", ".join(patterns)
    names = [name for pattern in patterns for name in expand(pattern)]
    return name_containers(names, most=_MAX_SUBJECTS, noun=noun)


def _make_step_statements(comparison: Comparison) -> Iterator[Statement]:
    """Yield a statement about each step, and about each change that breaks training."""
    steps = [*zip(comparison.reported, comparison.sentences, strict=True)]
    renames = {id(step): text for step, text in steps if isinstance(step, Renamed)}
    timings = comparison.explanation is not None and comparison.explanation.timings
    is_all = len(renames) == len(steps) and not (comparison.remaining or timings)
    unchanged = ["all communication is unchanged"] if is_all else []
    # A reviewer reads all renames at once, in place of the first.
    joined = "; ".join((*renames.values(), *unchanged))
    for step, text in steps:
        if id(step) not in renames:
            if not isinstance(step, Waits):
                yield _make_step_statement(step, text, comparison)
        elif id(step) == next(iter(renames)):
            yield _make_step_statement(step, joined, comparison)


def _make_timing_statements(comparison: Comparison) -> Iterator[Statement]:
    explanation = comparison.explanation
    for timing in () if explanation is None else explanation.timings:
        place = _locate_changed_calls(timing, comparison)
        yield Statement(severity="change", text=timing.describe(), place=place)


def _make_exposure_statements(comparison: Comparison) -> Iterator[Statement]:
    """Yield a statement about each change in exposed calls."""
    for change in comparison.exposures:
        is_only = not (comparison.remaining or comparison.reported)
        severity: Severity = "change" if change.is_lost or is_only else "rest"
        place = _locate_changed_calls(change, comparison)
        yield Statement(severity=severity, text=change.describe(), place=place)


def _make_host_wait_statements(comparison: Comparison) -> Iterator[Statement]:
    """Yield a statement about each new host wait that is not the cause of exposed calls."""
    named = [step for cause in comparison.causes for step in cause.steps]
    for step, text in zip(comparison.reported, comparison.sentences, strict=True):
        if isinstance(step, Waits) and step not in named:
            # Waits that expose nothing matter less than calls that can no longer be hidden.
            statement = _make_step_statement(step, text, comparison)
            yield replace(statement, severity="rest") if comparison.exposures else statement


def _locate_changed_calls(change: ExposureChange | TimingChange, comparison: Comparison) -> str:
    """Return ``at train.py:9``: the lines that issue the calls whose timing changed."""
    sites = tuple(
        (owner, site)
        for owner in change.owners
        for row in comparison.recorded.get((owner, change.key), ())
        for site in row.sites
        # FSDP gathers parameters wherever a module happens to run.
        if site.calls.role != Role.PARAMETERS and change.has_changed(site.calls)
    )
    calls = _drop_backward_call_sites(NewCalls(sites))
    return _describe_call_sites(calls)


def _make_step_statement(
    step: TrainingChange | Step, text: str, comparison: Comparison
) -> Statement:
    breaks = any(step is problem for problem in comparison.training)
    calls = _find_step_call_sites(step, comparison)
    return Statement(
        severity="breaks training" if breaks else "change",
        text=text,
        place=_describe_call_sites(calls),
        causes=tuple(cause.text for cause in comparison.causes if step in cause.steps),
        is_effect=isinstance(step, Step) and step.is_effect,
        sites=() if breaks else tuple(_list_call_sites(calls)[:_MAX_LINES]),
    )


def _make_cause_statement(cause: Cause, comparison: Comparison) -> Statement:
    """State a likely cause; if the host waits, with the lines of code where it does."""
    calls = NewCalls.join(
        _find_step_call_sites(step, comparison) for step in cause.steps if isinstance(step, Waits)
    )
    return Statement(severity="likely", text=cause.text, place=_describe_call_sites(calls))


def _group_changes_ignoring_sizes(rows: Iterable[Change]) -> Iterable[Sequence[Change]]:
    """Group new rows of modules, or lost ones, that differ only in the sizes of their calls."""
    groups: defaultdict[object, list[Change]] = defaultdict(list)
    for change in rows:
        key: object = id(change)
        sides = (*change.before, *change.after)
        if change.subject == "collective" and len(sides) == 1 and not sides[0].ranks:
            kinds = frozenset(_collect_call_kinds(sides[0]))
            key = change.phase, change.what, bool(change.after), sides[0].count, kinds
        groups[key].append(change)
    return groups.values()


def _make_joint_row_statement(changes: Sequence[Change], comparison: Comparison) -> Statement:
    """Describe changes that no step explains, and that share a line."""
    if len(changes) == 1:
        return _make_row_statement(changes[0], comparison)
    owners = chain.from_iterable(change.owners for change in changes)
    joined = replace(
        changes[0],
        owners=tuple(sorted(owners, key=lambda name: natural_key(name or ""))),
        new_calls=NewCalls.join(change.new_calls for change in changes),
    )
    sizes = [nbytes_of(change.before) + nbytes_of(change.after) for change in changes]
    amount = f"{show_nbytes(min(sizes))} to {show_nbytes(max(sizes))} per rank"
    return _make_row_statement(joined, comparison, amount)


def _make_row_statement(change: Change, comparison: Comparison, amount: str = "") -> Statement:
    """Describe a change that no step explains; `amount` replaces its bytes."""
    calls = _drop_backward_call_sites(_find_change_call_sites(change, comparison))
    # If parameters have new shapes, as many calls as before have new sizes.
    is_resized = change.subject == "collective" and any(
        isinstance(step, Step) and step.is_effect for step in comparison.reported
    )
    return Statement(
        severity="change",
        text=_describe_change(change, amount),
        place=_describe_issuers(change),
        sites=tuple(_list_call_sites(calls)[:_MAX_LINES]),
        is_effect=is_resized and count_calls(change.before) == count_calls(change.after),
    )


def _add_call_sites(
    main: Sequence[Statement], rest: Sequence[Statement], comparison: Comparison
) -> list[Statement]:
    """Add lines of code to what breaks training, and to the first change if no line is known."""
    differing = [change for change in comparison.changes if _list_call_sites(change.new_calls)]
    if comparison.training:
        # Missing calls have no call site, so use the call site of new calls in backward, if any.
        backward = [change.new_calls for change in differing if change.phase is Phase.BACKWARD]
        sites = _list_call_sites(backward[0]) if backward else []
    elif any(statement.sites for statement in (*main, *rest)):
        return [*main]
    else:
        new = [
            lines
            for row in differing
            if (lines := _list_call_sites(_find_change_call_sites(row, comparison)))
        ]
        sites = new[0] if new else []
    num = len(comparison.training) or 1
    return [
        *(replace(statement, sites=tuple(sites[:_MAX_LINES])) for statement in main[:num]),
        *main[num:],
    ]


def _find_step_call_sites(step: TrainingChange | Step, comparison: Comparison) -> NewCalls:
    """Return the lines of code that issued a change's new calls; empty if they are unknown."""
    if not isinstance(step, Replaced) or step.writes != "rows":
        return NewCalls()
    return NewCalls.join(
        _drop_backward_call_sites(comparison.new_calls(step, owner, key))
        for owner in step.sending_owners
        for key in step.rows[owner]
        if key.subject in {"collective", "host_wait"}
    )


def _drop_backward_call_sites(calls: NewCalls) -> NewCalls:
    """Remove lines that call ``.backward()``, because they issue all collectives of backward."""
    return replace(calls, sites=tuple(site for site in calls.sites if not site[1].is_of_backward))


def _find_change_call_sites(change: Change, comparison: Comparison) -> NewCalls:
    """Return a change's new calls; if added forwards are a cause, drop lines that had old calls."""
    calls, more = change.new_calls, count_calls(change.after) - count_calls(change.before)
    if not any(cause.text.startswith(NO_BACKWARD) for cause in comparison.causes):
        return calls
    # A line that issued more calls than were added must also have issued old calls.
    return replace(calls, sites=tuple(site for site in calls.sites if site[1].calls.count <= more))


def _list_call_sites(calls: NewCalls) -> list[str]:
    return [*dict.fromkeys(site.call_site for _, site in calls.sites if site.call_site)]


def _describe_call_sites(calls: NewCalls) -> str:
    """Return ``at a.py:9 or b.py:17``; empty if no line is known."""
    return f"at {_join_call_sites(calls)}" if _list_call_sites(calls) else ""


def _join_call_sites(calls: NewCalls) -> str:
    """Format the lines that may have issued the calls: ``a.py:9 or b.py:17``."""
    lines = _list_call_sites(calls)
    more = len(lines) - _MAX_LINES
    listed = [*lines[:_MAX_LINES], *([f"{more} more"] if more > 0 else [])]
    word = "and" if calls.is_certain or more > 0 else "or"
    return f" {word} ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _describe_change(change: Change, amount: str = "") -> str:
    if change.phase is None:
        before = f"{change.old_text} -> " if change.old_text else ""
        return f"{change.what}: {before}{change.new_text}"
    where = name_with_phase(change.owners, change.phase)
    each = ", each" if len(change.owners) > 1 else ""
    if change.subject == "collective":
        amounts = _describe_amounts(change)
        amounts = f"{amounts.partition(', ')[0]}, {amount}" if amount else amounts
        return f"{where}{each}: {change.what} {amounts}"
    times = _describe_amounts(change, " times")
    if change.subject == "host_wait":
        return f"{where}{each}: host waits for the GPU ({change.what}), {times}"
    verb = f"{change.what}ed"
    if change.subject == "redistribution":
        verb = f"redistributed {change.what.replace('->', ' -> ')}"
    often = "" if change.before and change.after else "now " if change.after else "no longer "
    return f"{where}{each}: {often}{verb}, {times}"


def _describe_amounts(change: Change, times: str = "") -> str:
    sides = change.before, change.after
    if not any(row.ranks for side in sides for row in side):
        before, after = (side[0] if side else None for side in sides)
        return _describe_row_change(before, after, times)
    if not all(row.ranks for side in sides for row in side):
        return f"{_show_amounts_by_ranks(change.before)} -> {_show_amounts_by_ranks(change.after)}"
    old, new = ({rank: row for row in side for rank in row.ranks} for side in sides)
    ranks_by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted({**old, **new}):
        before, after = old.get(rank), new.get(rank)
        if before is None or after is None or before.calls != after.calls:
            ranks_by_text[_describe_row_change(before, after, times)].append(rank)
    listed = [f"on {name_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    more = len(listed) - _MAX_RANK_SETS
    return "; ".join([*listed[:_MAX_RANK_SETS], *([f"{more} other changes"] if more > 0 else [])])


def _describe_row_change(before: Row | None, after: Row | None, times: str) -> str:
    was, now = (before.count if before else 0), (after.count if after else 0)
    text = f"{was} -> {now}{times} ({now - was:+})" if now != was else f"x{was}"
    old, new = (before.nbytes if before else 0), (after.nbytes if after else 0)
    unsized = (before.unsized if before else 0), (after.unsized if after else 0)
    parts = [text]
    if old != new:
        parts.append(f"{show_nbytes_change(old, new, unsized)} per rank")
    elif was != now and old and not any(unsized):
        parts.append("same bytes")
    if before and after and (other := _describe_other_op_or_dtype(before, after)):
        return ", ".join([*parts, other])
    is_other_kind = before and after and _collect_call_kinds(before) != _collect_call_kinds(after)
    if before and after and before.calls and (is_other_kind or (was, old) == (now, new)):
        removed, added = _show_calls_except(before, after), _show_calls_except(after, before)
        if removed and added:
            # Both texts contain the count, so drop it from `parts` if no call is unchanged.
            is_all = was == now and set(before.calls).isdisjoint(after.calls)
            parts = [*parts[is_all:], f"{removed} -> {added}"]
        elif removed or added:
            parts.append(f"{'removed' if removed else 'added'} {removed or added}")
    elif before and after and len(before.calls) > 1:
        old_counts, new_counts = (
            Counter({replace(calls, count=0): calls.count for calls in row.calls})
            for row in (before, after)
        )
        fewer, more = old_counts - new_counts, new_counts - old_counts
        if len(fewer) + len(more) == 1:  # one of several kinds of calls
            ((calls, count),) = (fewer or more).items()
            parts.append(f"{'removed' if fewer else 'added'} {replace(calls, count=count)}")
    return ", ".join(parts)


def _describe_other_op_or_dtype(before: Row, after: Row) -> str:
    """Return ``by sum instead of avg``, or ``in bfloat16 instead of float32``, if that is all."""
    old, new = (
        {
            replace(calls, reduce_op="", dtype="", nbytes=calls.nbytes // itemsize(calls.dtype))
            for calls in row.calls
        }
        for row in (before, after)
    )
    fields = {(calls.reduce_op or "sum", calls.dtype) for calls in before.calls}
    new_fields = {(calls.reduce_op or "sum", calls.dtype) for calls in after.calls}
    if old != new or len(fields) != 1 or len(new_fields) != 1:
        return ""
    pairs = zip(("by", "in"), fields.pop(), new_fields.pop(), strict=True)
    return ", ".join(f"{word} {now} instead of {was}" for word, was, now in pairs if was != now)


def _collect_call_kinds(amount: Row) -> set[Calls]:
    """Return a row's calls without their counts and sizes."""
    return {replace(calls, count=0, nbytes=0) for calls in amount.calls}


def _show_calls_except(amount: Row, excluded: Row) -> str:
    texts = [str(calls) for calls in amount.calls if calls not in excluded.calls]
    return join_first(texts, _MAX_CALLS)


def _show_amounts_by_ranks(amounts: Sequence[Row]) -> str:
    ranks_by_calls: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for amount in amounts:
        nbytes = show_nbytes(amount.nbytes, amount.unsized)
        calls = f"{show_count(amount.count, 'call')}, {nbytes} in total,"
        # List the calls if possible, because a sum hides differences between ranks, such as peers.
        if len(amount.calls) == 1:
            calls = str(amount.calls[0])
        ranks_by_calls[calls, bool(amount.ranks)] += amount.ranks
    listed = (
        f"{calls} on {name_ranks(ranks) if ranks else 'all ranks'}"
        for (calls, _), ranks in ranks_by_calls.items()
    )
    return " / ".join(listed) or "0"


def _describe_issuers(change: Change) -> str:
    calls = change.new_calls
    issued_in = {site.issued_in for owner, site in calls.sites if site.issued_in != owner} - {None}
    if not issued_in:
        calls = _drop_backward_call_sites(calls)
    parts = []
    if issued_in:
        of = f"the {change.phase} of " if change.phase in _PASSES else ""
        parts.append(f"requested by {of}{name_modules(issued_in)}")
    if _list_call_sites(calls):
        parts.append(f"called from {_join_call_sites(calls)}")
    return ", ".join(parts)


def change_sort_key(change: Change) -> tuple[bool, bool, bool, int]:
    """Return the sort key that puts the most important change first."""
    # Collectives come before unshards, which only repeat all-gathers, and before memory and assumed
    # values. In both groups, traffic that grows and gradients that shrink come before the rest.
    growth = _compute_nbytes_growth(change)
    is_late = change.subject in {"reshard", "memory", "answer"}
    calls = [call for row in change.before for call in row.calls] if change.after else []
    is_less = growth < 0 and any(call.role == Role.GRADIENTS for call in calls)
    is_loud = change.subject == "frame" or growth > 0 or is_less
    # Calls of user code in backward follow from those in forward.
    is_effect = change.phase is Phase.BACKWARD and _is_change_of_user_calls(change)
    return (is_late, is_effect, not is_loud, -abs(growth))
