"""The steps of a story as lines: what is different as a whole, in the author's words."""

from __future__ import annotations

from collections import defaultdict
from functools import singledispatch
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.story import steps
from pytest_fsdp_comm.comm.story.facts import count_of, nbytes_of
from pytest_fsdp_comm.text.fqn import NO_MODULE, ROOT_TEXT, fold_fqns
from pytest_fsdp_comm.text.nbytes import show_nbytes, show_nbytes_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from fractions import Fraction

    from pytest_fsdp_comm.comm.profile import RowKey
    from pytest_fsdp_comm.comm.story.facts import Fact, Facts, Owner
    from pytest_fsdp_comm.comm.story.steps import Step
    from pytest_fsdp_comm.comm.story.timing import Shares, TimingChange

MAX_PATTERNS: Final = 3


def name_owners(owners: Iterable[Owner]) -> str:
    """Modules as few patterns: ``(root), layers.{0..3}``."""
    held = list(owners)
    patterns = list(fold_fqns(name for name in held if name is not None))
    if None in held:
        patterns.append(NO_MODULE)
    more = len(patterns) - MAX_PATTERNS
    shown = ", ".join(patterns[:MAX_PATTERNS])
    return f"{shown} and {more} more" if more > 0 else shown


def timing_line(change: TimingChange) -> str:
    """What is issued earlier or later, or waited for differently."""
    what = f"{name_owners(change.owners)} {change.phase}: {change.kind}[{change.axis}]"
    if change.subject == "async":
        values = [value for value, _ in change.after]
        if values == [1]:
            return f"{what} asynchronous now (async_op=True)"
        if values == [0]:
            return f"{what} synchronous now: the caller waits for it"
        return f"{what} asynchronous in {change.after[-1][1]} of its calls now"
    return f"{what} issued {_shares(change.before)} -> {_shares(change.after)} units ahead of use"


def _shares(shares: Shares) -> str:
    if len(shares) == 1:
        return str(shares[0][0])
    return " or ".join(str(value) for value, _ in shares)


@singledispatch
def step_line(step: Step) -> str:
    """A step in one line."""
    raise TypeError(
        f"no words for {type(step).__name__}: expected one of those in comm/story/steps"
    )


@step_line.register
def _(step: steps.AxisRenamed) -> str:
    if step.is_alike:
        return f"mesh axis {step.old} is {step.new} now, over the same ranks"
    return f"all that was sent over {step.old} is sent over {step.new} now"


@step_line.register
def _(step: steps.Renamed) -> str:
    but_root = ", but for the parameters of the root" if step.keeps_root else ""
    if not step.old:
        return f"everything is below {step.new} now{but_root}"
    if not step.new:
        return f"what was below {step.old} is at the top now{but_root}"
    same = ", or another module with equal rows in its place" if step.is_leaf else ""
    return f"{step.old} is {step.new} now{same}"


@step_line.register
def _(step: steps.Layers) -> str:
    what = ", each as its siblings" if step.new > step.old else ""
    modules = "modules" if step.has_units else "modules that send"
    return f"{step.prefix or ROOT_TEXT}: {step.old} -> {step.new} {modules}{what}"


@step_line.register
def _(step: steps.Counts) -> str:
    times = show_factor(step.factor)
    match step.scope:
        case steps.Scope.EVERYTHING:
            return f"every count {times}"
        case steps.Scope.PASSES:
            return f"all counts of forward and backward {times}"
        case steps.Scope.UNREDUCED | steps.Scope.UNREDUCED_OUTSIDE:
            often = show_factor(step.reductions)
            what = (
                "forwards and backwards"
                if step.has_activations
                else "all counts of forward and backward"
            )
            return f"{what} {times}, reductions of gradients {often}"
        case steps.Scope.FORWARD:
            kept = f"; {name_owners(step.kept)} kept, and gathered as before" if step.kept else ""
            return f"counts of forward {times}, of backward x1{kept}"
        case steps.Scope.ACTIVATIONS:
            return f"activations sent {step.factor} times as often"
        case steps.Scope.OPTIMIZER:
            return f"all counts of the optimizer's phase {times}"


def show_factor(factor: Fraction) -> str:
    """``x4``, ``x1/2``."""
    return f"x{factor}"


@step_line.register
def _(step: steps.ActivationSizes) -> str:
    loss = " and the loss" if step.with_loss else ""
    return f"activations{loss}: {show_factor(step.factor)} bytes in each call"


@step_line.register
def _(step: steps.Dtype) -> str:
    axes: defaultdict[str, list[str]] = defaultdict(list)
    for role, axis in sorted(step.parts, key=lambda part: (_ROLES.index(part[0]), part[1])):
        axes[role].append(axis)
    parts = ", ".join(f"{role}[{','.join(found)}]" for role, found in axes.items())
    where = f"{name_owners(step.owners)}: " if step.owners else ""
    nbytes = "as many" if step.factor == 1 else show_factor(step.factor)
    return f"{where}{parts} {step.old} -> {step.new}, {nbytes} bytes"


_ROLES: Final = tuple(Role)


@step_line.register
def _(step: steps.AxisSizes) -> str:
    return f"gradients[{step.axis}]: {show_factor(step.factor)} bytes in each call"


@step_line.register
def _(step: steps.UnitSizes) -> str:
    owners: defaultdict[tuple[int, int], list[Owner]] = defaultdict(list)
    for owner, nbytes in step.nbytes.items():
        owners[nbytes].append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    shown = [
        f"{name_owners(found)} {show_nbytes_change(*nbytes) if all(nbytes) else 'resized'}"
        for nbytes, found in groups[:MAX_PATTERNS]
    ]
    more = len(groups) - len(shown)
    rest = f" and {more} more" if more > 0 else ""
    return f"other sizes of parameters: {', '.join(shown)}{rest} in each gather"


@step_line.register
def _(step: steps.Kept) -> str:
    return (
        f"{name_owners(step.owners)} kept gathered after forward, not gathered in backward"
        f": {_calls(_minus(_sent(step.was, _is_gather), _sent(step.rows, _is_gather)))} less"
    )


@step_line.register
def _(step: steps.Freed) -> str:
    return (
        f"{name_owners(step.owners)} freed after forward, gathered again in backward"
        f": {_calls(_minus(_sent(step.rows, _is_gather), _sent(step.was, _is_gather)))} more"
    )


@step_line.register
def _(step: steps.GatheredElsewhere) -> str:
    axes = sorted(
        {key.axis for rows in step.rows.values() for key in rows if rows[key] and key.axis}
    )
    return f"{name_owners(step.owners)} gathered over {', '.join(axes)} in backward now"


@step_line.register
def _(step: steps.BackwardGone) -> str:
    acts = "neither gathered nor reduced" if step.has_reductions else "not gathered"
    return f"{name_owners(step.owners)} {acts} in backward any more"


@step_line.register
def _(step: steps.BackwardCame) -> str:
    acts = "gathered and reduced" if step.has_reductions else "gathered"
    return f"{name_owners(step.owners)} {acts} in backward now"


@step_line.register
def _(step: steps.ReducedTimes) -> str:
    counts = {
        (count_of(step.was[owner][key]), count_of(facts))
        for owner, rows in step.rows.items()
        for key, facts in rows.items()
        if key.axis
    }
    how = (
        "{} -> {} times".format(*next(iter(counts)))
        if len(counts) == 1
        else f"{step.times} times as often"
    )
    kinds = ", ".join(step.kinds)
    rest = ", gathers as before" if step.is_sharded else ""
    return f"gradients of {name_owners(step.owners)} reduced {how} ({kinds}){rest}"


@step_line.register
def _(step: steps.ReductionGone) -> str:
    what = f"gradients of {name_owners(step.owners)}"
    if not step.is_all:
        return f"{what} no longer reduced by {_kinds(step.was)} too, all else as before"
    return f"{what} no longer reduced ({_kinds(step.was)}), gathers as before"


@step_line.register
def _(step: steps.ReductionCame) -> str:
    what = f"gradients of {name_owners(step.owners)}"
    if not step.is_all:
        return f"{what} reduced by {_kinds(step.rows)} too now, all else as before"
    return f"{what} reduced now ({_kinds(step.rows)}), gathers as before"


def _kinds(rows: Mapping[Owner, Mapping[RowKey, Facts]]) -> str:
    found = {f"{key.what}[{key.axis}]" for held in rows.values() for key in held if key.axis}
    return ", ".join(sorted(found))


@step_line.register
def _(step: steps.PartReduced) -> str:
    return f"another part of the gradients reduced, gathers as before: {_resized(step)}"


@step_line.register
def _(step: steps.GradientSizes) -> str:
    return f"gradients of {_resized(step)}"


def _resized(step: steps.Replaced) -> str:
    owners: defaultdict[tuple[int, int], list[Owner]] = defaultdict(list)
    for owner, rows in step.rows.items():
        sizes = {
            (_largest(step.was[owner][key]), _largest(facts))
            for key, facts in rows.items()
            if key.axis
        }
        owners[max(sizes)].append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    shown = [
        f"{name_owners(found)} {show_nbytes_change(*sizes)}"
        for sizes, found in groups[:MAX_PATTERNS]
    ]
    more = len(groups) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more > 0 else ''} in each call"


def _largest(facts: Facts) -> int:
    return max((fact.nbytes for fact in facts), default=0)


@step_line.register
def _(step: steps.Replicated) -> str:
    return (
        f"{name_owners(step.owners)} replicated instead of sharded: gradients all-reduced, "
        "parameters no longer gathered"
    )


@step_line.register
def _(step: steps.Sharded) -> str:
    return (
        f"{name_owners(step.owners)} sharded instead of replicated: parameters gathered, "
        "gradients reduce-scattered"
    )


@step_line.register
def _(step: steps.SplitOff) -> str:
    gathers = _sent({module: step.rows[module] for module in step.modules}, _is_gather)
    often = max(steps.gathers_in_forward(step, step.modules), default=0)
    times = f", gathered {often} times in forward" if steps.is_called_more_often(step) else ""
    return f"{name_owners(step.modules)} split off {name_owners(step.units)}{times}{_more(gathers)}"


@step_line.register
def _(step: steps.Merged) -> str:
    return f"{name_owners(step.modules)} merged into {name_owners(step.units)}, gathered with it"


@step_line.register
def _(step: steps.Regrouped) -> str:
    groups = f"{name_owners(step.old)} -> {name_owners(step.new)}"
    return f"other units, with as many bytes together: {groups}"


@step_line.register
def _(step: steps.Called) -> str:
    owners: defaultdict[int, list[Owner]] = defaultdict(list)
    for owner, rows in step.rows.items():
        owners[_gathers(rows)].append(owner)
    shown = [f"{name_owners(found)} {_times(count)}" for count, found in sorted(owners.items())]
    return f"gathered in forward: {', '.join(shown)}; other units {_times(step.others)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _gathers(rows: Mapping[RowKey, Facts]) -> int:
    return sum(
        count_of(facts)
        for key, facts in rows.items()
        if key.phase is Phase.FORWARD and key.what == "all_gather"
    )


@step_line.register
def _(step: steps.RecomputeCame) -> str:
    return (
        f"forward collectives of {name_owners(step.owners)} repeated by recomputation in backward"
        f"{_more(_sent(step.rows, lambda _: True))}"
    )


@step_line.register
def _(step: steps.RecomputeGone) -> str:
    return f"nothing of {name_owners(step.owners)} is sent again by recomputation any more"


@step_line.register
def _(step: steps.SequenceParallel) -> str:
    kinds = ("all-reduces", "reduce-scatters")
    old, new = kinds if step.is_on else kinds[::-1]
    became = f"forward {old} became {new} of as many bytes"
    if not step.is_whole:
        owners = [
            owner
            for owner, rows in step.rows.items()
            if any(key.what in _SUMS and key.phase is Phase.FORWARD for key in rows)
        ]
        return f"{name_owners(owners)}[{step.axis}]: {became}"
    state = "on" if step.is_on else "off"
    return f"sequence parallelism over {step.axis} {state}: {became}"


_SUMS: Final = frozenset({"all_reduce", "reduce_scatter"})


@step_line.register
def _(step: steps.AxisCame) -> str:
    sent = _sent(step.rows, lambda fact: fact.row.axis == step.axis)
    return f"sent over {step.axis} now, over which nothing was: {_calls(sent)}"


@step_line.register
def _(step: steps.AxisGone) -> str:
    return f"nothing is sent over {step.axis} any more"


@step_line.register
def _(step: steps.PhaseGone) -> str:
    return f"nothing is sent in {_phases(step)} any more, forward as before"


@step_line.register
def _(step: steps.PhaseCame) -> str:
    sent = _sent(step.rows, lambda fact: fact.row.phase in step.phases)
    return f"{_phases(step)} came, forward as before{_more(sent)}"


def _phases(step: steps.PhaseGone) -> str:
    phases = {key.phase for rows in step.rows.values() for key in rows}
    named = [str(phase) for phase in step.phases if phase in phases]
    return " and ".join("the loss" if phase == Phase.OUTSIDE else phase for phase in named)


@step_line.register
def _(step: steps.UnitRemoved) -> str:
    where = name_owners(step.owners)
    return f"{where} no longer gathered nor reduced, other units gathered as before"


@step_line.register
def _(step: steps.UnitAdded) -> str:
    gathers = _sent(step.rows, _is_gather)
    return f"{name_owners(step.owners)} gathered now, other units as before{_more(gathers)}"


@step_line.register
def _(step: steps.Redistributed) -> str:
    source, _, target = step.change.partition("->")
    where = name_owners(step.owners)
    if not step.came:
        return f"{where} {step.phase}: no redistribution {source} -> {target} any more"
    more = _minus(_sent(step.rows, lambda _: True), _sent(step.was, lambda _: True))
    return (
        f"{where} {step.phase}: redistributed {source} -> {target}, which sends "
        f"{_kinds(step.rows)}: {_calls(more)}"
    )


@step_line.register
def _(step: steps.GatheredInFull) -> str:
    more = _minus(_sent(step.rows, lambda _: True), _sent(step.was, lambda _: True))
    return f"DTensors gathered in full outside of forward and backward: {_calls(more)} more"


@step_line.register
def _(step: steps.Buckets) -> str:
    counts = {count_of(facts) for rows in step.rows.values() for facts in rows.values()}
    times = "/".join(map(str, sorted(counts)))
    calls = "1 call" if counts == {1} else f"{times} calls"
    return f"gradients of {name_owners(step.owners)} sent in {calls}, as many bytes in all"


def _is_gather(fact: Fact) -> bool:
    return fact.role == Role.PARAMETERS


_Sent = tuple[int, int]
"""Calls and bytes, over all owners."""


def _sent(rows: Mapping[Owner, Mapping[RowKey, Facts]], includes: Callable[[Fact], bool]) -> _Sent:
    count = nbytes = 0
    for held in rows.values():
        for key, facts in held.items():
            meant = {fact: n for fact, n in facts.items() if includes(fact)}
            if key.subject == "collective":
                count += count_of(meant)
                nbytes += nbytes_of(meant)
    return count, nbytes


def _minus(more: _Sent, less: _Sent) -> _Sent:
    return more[0] - less[0], more[1] - less[1]


def _more(sent: _Sent) -> str:
    return f": {_calls(sent)}" if sent[0] else ""


def _calls(sent: _Sent) -> str:
    count, nbytes = sent
    if count == 1:
        return f"1 call of {show_nbytes(nbytes)}" if nbytes else "1 call"
    return f"{count} calls, {show_nbytes(nbytes)} in all" if nbytes else f"{count} calls"
