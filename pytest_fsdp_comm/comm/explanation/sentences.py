"""Describe steps, training problems and timing changes in one line each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.calls import NOT_LAST, Calls
from pytest_fsdp_comm.comm.cost import Volume
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Scope, Sizes
from pytest_fsdp_comm.comm.explanation.names import AxisRenamed, Layers, Renamed
from pytest_fsdp_comm.comm.explanation.passes import sum_in_forward
from pytest_fsdp_comm.comm.explanation.search import Shares, TimingChange
from pytest_fsdp_comm.comm.explanation.states import Owner, is_gather, largest
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step, sent_rows
from pytest_fsdp_comm.comm.explanation.training import TrainingChange
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import ROOT_TEXT, name_owners
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.text.words import counted, show_nbytes, show_nbytes_change

_MAX_GROUPS: Final = 3
_ROLES: Final = tuple(Role)
_FULL: Final = {
    frozenset({"all_gather"}): ("full", "gathered"),
    frozenset({"all_reduce"}): ("partial", "reduced"),
    frozenset({"all_gather", "all_reduce"}): ("full or partial", "gathered or reduced"),
}
"""An adjective and a verb for DTensors that are gathered in full, keyed by the kinds of calls."""
_PLACES: Final[Mapping[str, str]] = {
    Phase.OUTSIDE: "outside forward and backward",
    Phase.OPTIMIZER: "in the optimizer",
}
_NUMBERS: Final = re.compile(r"[0-9{},.]+")


def name_modules(owners: Collection[Owner], *, most: int = 3) -> str:
    """Name modules like `name_owners`, but put ``module`` before bare numbers."""
    text = name_owners(owners, most=most)
    if not any(map(_NUMBERS.fullmatch, text.split(", "))):
        return text
    return f"{'module' if len(owners) == 1 else 'modules'} {text}"


def name_place(owners: Collection[Owner], phase: Phase | str) -> str:
    """Name modules and a phase: ``layers.{0..2} in forward``."""
    return f"{name_modules(owners)} {_place(phase)}"


def _place(phase: Phase | str) -> str:
    return _PLACES.get(phase, f"in {phase}")


def sentence(step: TrainingChange | Step) -> str:
    """Describe a step, or a change that breaks training, in one line."""
    match step:
        case TrainingChange():
            return _of_training(step)
        case AxisRenamed() | Renamed() | Layers():
            return _of_names(step)
        case Counts():
            return _of_counts(step)
        case Sizes():
            loss = " and the loss" if step.with_loss else ""
            tensors = f"gradients[{step.axis}]" if step.axis else f"activations{loss}"
            return f"{tensors}: x{step.factor} bytes per call"
        case Dtype():
            return _of_dtype(step)
        case Replaced():
            return _of_replaced(step)
    raise AssertionError(step)


def _of_names(step: AxisRenamed | Renamed | Layers) -> str:
    match step:
        case AxisRenamed() if step.has_same_ranks:
            return f"mesh axis {step.old} renamed to {step.new} (same ranks)"
        case AxisRenamed():
            return f"all collectives over {step.old} moved to {step.new}"
        case Layers():
            added = ", the new ones like their siblings" if step.new > step.old else ""
            modules = "modules" if step.has_units else "modules that communicate"
            return f"{step.prefix or ROOT_TEXT}: {step.old} -> {step.new} {modules}{added}"
    if not step.old:
        modules = "all modules except the root unit" if step.keeps_root else "all modules"
        return f"{modules} moved below {step.new}"
    if not step.new:
        root = "; the root unit did not move" if step.keeps_root else ""
        return f"modules below {step.old} moved to the top level{root}"
    replaced = " (or replaced by a module with the same rows)" if step.is_leaf else ""
    return f"module {step.old} renamed to {step.new}{replaced}"


def _of_counts(step: Counts) -> str:
    times = f"x{step.factor}"
    match step.scope:
        case Scope.EVERYTHING:
            return f"all counts {times}"
        case Scope.FORWARD:
            counts = f"forward calls {times}, backward calls unchanged"
            if not step.excluded:
                return counts
            units = name_modules(step.excluded)
            return f"{counts}; gathers of {units} unchanged (not resharded after forward)"
        case Scope.ACTIVATIONS:
            return f"activation calls {times}"
        case Scope.OPTIMIZER:
            return f"all calls in the optimizer phase {times}"
    calls = "all forward and backward calls"
    if step.reductions == step.factor:
        return f"{calls} {times}"
    calls = "forwards and backwards" if step.has_activations else calls
    reductions = "unchanged" if step.reductions == 1 else f"x{step.reductions}"
    return f"{calls} {times}, gradient reductions {reductions}"


def _of_dtype(step: Dtype) -> str:
    axes: defaultdict[str, list[str]] = defaultdict(list)
    for role, axis in sorted(step.parts, key=lambda part: (_ROLES.index(part[0]), part[1])):
        axes[role].append(axis)
    parts = ", ".join(f"{role}[{','.join(names)}]" for role, names in axes.items())
    where = f"{name_modules(step.owners)}: " if step.owners else ""
    nbytes = "same" if step.factor == 1 else f"x{step.factor}"
    return f"{where}{parts} {step.old} -> {step.new}, {nbytes} bytes"


def _of_replaced(step: Replaced) -> str:
    who, facts = name_modules(step.owners), step.facts
    now, no_longer = ("now ", "") if step.is_added else ("", "no longer ")
    match step.kind:
        case "reduced times":
            counts = [{row.count for row in sent_rows(side)} for side in (step.was, step.rows)]
            often = f"{facts['times']} times as often"
            if all(len(side) == 1 for side in counts):
                often = "{} -> {} times".format(*chain(*counts))
            kinds = ", ".join(sorted({row.what for row in sent_rows(step.rows)}))
            gathers = ", gathers unchanged" if facts["is_sharded"] else ""
            return f"gradients of {who} reduced {often} ({kinds}){gathers}"
        case "reduced by more":
            how = "now also" if step.is_added else "no longer"
            return f"gradients of {who} {how} reduced by {_sums(step)}, all else unchanged"
        case "reduced":
            return f"gradients of {who} {now}{no_longer}reduced ({_sums(step)}), gathers unchanged"
        case "part reduced" | "gradient sizes":
            gradients = "gradients of"
            if step.kind == "part reduced":
                gradients = "gradients of different parameters are now reduced, gathers unchanged:"
            sizes = {
                owner: max((largest(was[key]), largest(now[key])) for key in now if key.axis)
                for (owner, now), was in zip(step.rows.items(), step.was.values(), strict=True)
            }
            return f"{gradients} {_sizes(sizes)} per call"
        case "buckets":
            numbers = {
                sum(call.count for call in row.calls if call.role == Role.GRADIENTS)
                for row in sent_rows(step.rows)
            }
            calls = "1 call" if numbers == {1} else f"{'/'.join(map(str, sorted(numbers)))} calls"
            return f"gradients of {who} now reduced in {calls}, same bytes in total"
        case "sequence parallel":
            return _of_sequence_parallel(step)
        case "axis":
            axis = facts["axis"]
            if not step.is_added:
                return f"no more collectives over {axis}"
            # Do not subtract replaced rows: they have this axis only because it was renamed.
            calls = _calls(step, lambda key, _: key.axis == axis, is_new=True)
            return _with_calls(f"new collectives over {axis}, which had none before", calls)
        case "recomputed" if facts["is_moved"]:
            pair = ("recomputation", "backward") if step.is_added else ("backward", "recomputation")
            return "{} gathered in {} instead of {}".format(who, *pair)
        case "recomputed":
            if not step.is_added:
                return f"recomputation no longer repeats the forward collectives of {who}"
            return f"recomputation now repeats the forward collectives of {who}: {_calls(step)}"
        case "phase":
            phases = {key.phase for rows in step.rows.values() for key in rows}
            names = {Phase.OUTSIDE: "the loss", Phase.OPTIMIZER: "the optimizer"}
            where = " and ".join(
                names.get(phase, phase) for phase in facts["phases"] if phase in phases
            )
            if not step.is_added:
                return f"no more collectives in {where}, forward unchanged"
            calls = _calls(step, lambda key, _: key.phase in facts["phases"])
            return _with_calls(f"new collectives in {where}, forward unchanged", calls)
        case "redistributed":
            source, _, target = facts["change"].partition("->")
            where = name_place(step.owners, facts["phase"])
            change = f"{where}: {now}{no_longer}redistributed {source} -> {target}"
            return f"{change} by {_sums(step)}: {_calls(step)}" if step.is_added else change
        case "gathered in full":
            keys = [key for rows in step.rows.values() for key in rows]
            word, verb = _FULL[frozenset(key.what for key in keys if key.subject == "collective")]
            tensors = f"{word} {facts['roles'] or 'DTensors'} {verb}"
            tensors = f"{who}: {tensors}" if facts["roles"] else tensors
            where = _place(facts["phase"])
            return f"{tensors} {where}: {_calls(step, is_change=True)}"
        case "unit sizes":
            return f"parameter sizes changed: {_sizes(facts['sizes'])} per gather"
        case "freed":
            how = "resharded after forward and gathered again in backward"
            if not step.is_added:
                how = "resharded after forward, so not gathered again in backward"
            calls = _calls(step, is_gather, is_change=True)
            return f"{who} {now}{no_longer}{how}: {calls}"
        case "gathered elsewhere":
            keys = [key for rows in step.rows.values() for key, value in rows.items() if value]
            axes = sorted({key.axis for key in keys} - {""})
            return f"{who} now gathered over {', '.join(axes)} in backward"
        case "used in backward":
            how = "gathered and reduced" if step.is_added else "gathered or reduced"
            return f"{who} {now}{no_longer}{how} in backward"
        case "gathered in backward":
            calls = _calls(step, is_gather) if step.is_added else ""
            return _with_calls(f"{who} {now}{no_longer}gathered in backward", calls)
        case "sharded" if step.is_added:
            gathered = "parameters gathered, gradients reduce-scattered"
            return f"{who} sharded instead of replicated: {gathered}"
        case "sharded":
            reduced = "gradients all-reduced, parameters no longer gathered"
            return f"{who} replicated instead of sharded: {reduced}"
        case "split off":
            parts = name_modules(facts["modules"])
            parents = f"unit{'s' * (len(facts['parents']) > 1)} {name_owners(facts['parents'])}"
            if not step.is_added:
                return f"{parts} merged into {parents}"
            times = f", gathered {facts['times']} times in forward" if facts["times"] else ""
            calls = _calls(step, is_gather, facts["modules"])
            return _with_calls(f"{parts} split off from {parents}{times}", calls)
        case "regrouped":
            return (
                "units regrouped, same bytes in total: "
                f"{name_modules(facts['removed'])} -> {name_modules(facts['added'])}"
            )
        case "called":
            return _of_called(step)
        case "unit":
            other_units = facts["other_units"]
            if not step.is_added:
                unchanged = f", gathers of other units {other_units}" if other_units else ""
                return f"{who} no longer gathered{' or reduced' * facts['is_reduced']}{unchanged}"
            unchanged = f", other units {other_units}" if other_units else ""
            return _with_calls(f"{who} now gathered{unchanged}", _calls(step, is_gather))
    raise AssertionError(step)


def _of_called(step: Replaced) -> str:
    who = name_modules(step.owners)
    other_count = step.facts["other_units"]
    owners: defaultdict[int, list[Owner]] = defaultdict(list)
    for owner in step.owners:
        owners[step.facts["times"][owner]].append(owner)
    if owners.keys() == {other_count}:
        counts = {
            sum(row.count for row in sent_rows({owner: rows}) if row.phase is Phase.FORWARD)
            for owner, rows in step.was.items()
        }
        was = "/".join(map(str, sorted(counts)))
        return f"{who} gathered {was} -> {other_count} times in forward, like the other units"
    if len(owners) == 1:
        (count,) = owners
        return f"{who} gathered {_times(count)} in forward, other units {_times(other_count)}"
    units = [f"{name_modules(group)} {_times(count)}" for count, group in sorted(owners.items())]
    return f"gathered in forward: {', '.join(units)}; other units {_times(other_count)}"


def _of_sequence_parallel(step: Replaced) -> str:
    facts, kinds = step.facts, ("all-reduces", "reduce-scatters")
    old, new = kinds if step.is_added else kinds[::-1]
    became = f"forward {old} became {new} of the same size"
    if facts["is_whole"]:
        is_on = "switched on" if step.is_added else "switched off"
        return f"sequence parallelism over {facts['axis']} {is_on}: {became}"
    sums = {sum_in_forward(kind, facts["axis"]) for kind in ("all_reduce", "reduce_scatter")}
    owners = [owner for owner, rows in step.rows.items() if not sums.isdisjoint(rows)]
    return f"{name_modules(owners)}[{facts['axis']}]: {became}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sums(step: Replaced) -> str:
    """Name the kinds and axes of a step's collectives: ``all_reduce[rep], reduce_scatter[dp]``."""
    return ", ".join(sorted({str(key) for rows in step.rows.values() for key in rows if key.axis}))


def _calls(
    step: Replaced,
    includes: Callable[[RowKey, Calls], bool] = lambda _key, _call: True,
    owners: Iterable[Owner] = (),
    *,
    is_new: bool = False,
    is_change: bool = False,
) -> str:
    """Describe the calls that a step adds: ``3 calls, 30.0 KiB in total``; empty if there are none.

    With `is_change`, add signs: ``+3 calls, +30.0 KiB``. With `is_new`, do not subtract old calls.
    """
    amounts: defaultdict[tuple[int, ...], Volume] = defaultdict(Volume)  # keyed by ranks
    is_sized = True
    for sign, side in ((1, step.rows), (-1, {} if is_new else step.was)):
        for owner in owners or step.owners:
            for key, rows in side.get(owner, {}).items():
                for row in rows if key.subject == "collective" else ():
                    for call in filter(partial(includes, key), row.calls):
                        count = sign * call.count
                        amounts[row.ranks] += Volume(count=count, nbytes=count * call.nbytes)
                        is_sized &= not call.lacks_size

    def amount_of(volume: Volume) -> str:
        calls, size = counted(abs(volume.count), "call"), show_nbytes(abs(volume.nbytes))
        # If some calls have no size, the bytes of the other calls would look like the total.
        has_size = bool(volume.nbytes) and is_sized
        if is_change:
            calls = f"{'-' if volume.count < 0 else '+'}{calls}"
            size = f"{'-' if volume.nbytes < 0 else '+'}{size}"
        if not has_size:
            return calls
        if is_change:
            return f"{calls}, {size}"
        return f"{calls} of {size}" if abs(volume.count) == 1 else f"{calls}, {size} in total"

    everywhere = amounts.pop((), Volume())
    ranks_with_rows = sorted(set(chain(*amounts)))
    ranks_by_amount: defaultdict[Volume, list[int]] = defaultdict(list)
    for rank in ranks_with_rows:
        volumes = (volume for ranks, volume in amounts.items() if rank in ranks)
        ranks_by_amount[sum(volumes, everywhere)].append(rank)
    texts = [
        f"{amount_of(volume)} on {'each of ' * (len(ranks) > 1)}{name_ranks(ranks)}"
        for volume, ranks in ranks_by_amount.items()
        if volume.count
    ]
    if len(texts) > _MAX_GROUPS:
        counts = [abs(volume.count) for volume in ranks_by_amount]
        least = f"{min(counts)} to " if min(counts) < max(counts) else ""
        texts = [f"{least}{counted(max(counts), 'call')} on each of {name_ranks(ranks_with_rows)}"]
    if everywhere.count:
        where = f" on each rank except {write_ranks(ranks_with_rows)}" if ranks_with_rows else ""
        texts.append(f"{amount_of(everywhere)}{where}")
    return ", ".join(texts)


def _with_calls(text: str, calls: str) -> str:
    return f"{text}: {calls}" if calls else text


def _sizes(sizes: Mapping[Owner, tuple[int, int]]) -> str:
    """Format old and new sizes, largest change first: ``layers.{0..2} 10.1 -> 40.2 KiB``."""
    # The bytes are 0 for modules whose calls have several sizes.
    owners: dict[tuple[int, int], list[Owner]] = {}
    for owner, nbytes in sizes.items():
        owners.setdefault(nbytes, []).append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    texts = [
        f"{name_modules(group)} {show_nbytes_change(*nbytes) if all(nbytes) else 'resized'}"
        for nbytes, group in groups[:_MAX_GROUPS]
    ]
    more = len(groups) - len(texts)
    return f"{', '.join(texts)}{f' and {more} more' if more > 0 else ''}"


def _of_training(change: TrainingChange) -> str:
    who, over = name_modules(change.owners), " and ".join(change.axes)
    gradients, before, after = f"gradients of {who} are", change.before, change.after
    was, now = _amount(change.was), _amount(change.now)
    nbytes = f"{show_nbytes_change(change.was.nbytes, change.now.nbytes)} per rank"
    match change.problem:
        case "unsharded":
            return (
                f"parameters of {who} are no longer sharded: no unit gathers them, and their "
                f"gradients are no longer reduced over {over} (was {was})"
            )
        case "unreduced":
            return f"{gradients} no longer reduced over {over} (was {was})"
        case "part":
            fewer = f"fewer {gradients} reduced over {over}, gathers unchanged"
            return f"{fewer}: {counted(change.now.count, 'call')}, {nbytes}"
        case "passes":
            passes = f"{counted(int(after), 'backward')} instead of {before}"
            return f"gradients of {who} come from {passes}, forwards unchanged: {now} over {over}"
        case "ranks":
            return f"{gradients} reduced over {after} ranks instead of {before}: {now}"
        case "times":
            calls = f"{change.was.count} -> {change.now.count} calls"
            often = f"{before} -> {after} times per step"
            return f"{gradients} reduced {often} over {over}: {calls}, {nbytes}"
        case "backwards":
            where = "in the last backward"
            if after:
                where = f"in {after.removesuffix(NOT_LAST)}, but not in the last"
            instead = f" (was in {before.removesuffix(NOT_LAST)})" if before else ""
            return f"{gradients} now reduced {where}{instead}: {now} over {over}"
        case "reduce_op":
            how = f"by {after or 'sum'} instead of {before or 'sum'}"
            return f"{gradients} reduced {how} over {over}: {now}"
        case "dtype":
            return f"{gradients} reduced over {over} in {after} instead of {before}: {now}"


def _amount(volume: Volume) -> str:
    return f"{counted(volume.count, 'call')}, {show_nbytes(volume.nbytes)} per rank"


def timing_sentence(change: TimingChange) -> str:
    """Describe a change in when calls are issued, or in whether they are asynchronous."""
    where, calls = name_place(change.owners, change.key.phase), str(change.key)
    if change.subject == "ahead":
        some, how = _prefetching(change.before, change.after)
        before, after = (
            " or ".join(str(ahead) for ahead, _ in shares)
            for shares in (change.before, change.after)
        )
        return f"{where}: {some}{calls} {how} ({before} -> {after} units ahead of use)"
    last, share = change.after[-1]
    if len(change.after) > 1:
        return f"{where}: {calls} now asynchronous in {share} of its calls"
    if last:
        return f"{where}: {calls} now asynchronous (async_op=True)"
    return f"{where}: {calls} now synchronous: the caller waits for it"


def _prefetching(was: Shares, now: Shares) -> tuple[str, str]:
    """Describe a change in prefetching; a gather 0 units ahead of its use is not prefetched."""
    (fewest_was, most_was), (fewest, most) = ((side[0][0], side[-1][0]) for side in (was, now))
    if most == 0 or fewest == 0 < fewest_was:
        return "some " if most else "", "no longer prefetched"
    if most_was == 0:
        return "" if fewest else "some ", "now prefetched"
    if fewest_was == 0 < fewest:
        return "", "now always prefetched"
    mean_was, mean = (sum(ahead * share for ahead, share in side) for side in (was, now))
    how = "later" if mean < mean_was else "earlier" if mean > mean_was else "at other times"
    return "", f"prefetched {how}"
