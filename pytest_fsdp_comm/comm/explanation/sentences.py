"""All wording of steps: what is told of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.calls import NOT_LAST, Calls
from pytest_fsdp_comm.comm.cost import Volume
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Scope, Sizes
from pytest_fsdp_comm.comm.explanation.names import AxisRenamed, Layers, Renamed
from pytest_fsdp_comm.comm.explanation.passes import sum_in_forward
from pytest_fsdp_comm.comm.explanation.search import TimingChange
from pytest_fsdp_comm.comm.explanation.states import Owner, is_gather, largest
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step, sent_rows
from pytest_fsdp_comm.comm.explanation.training import TrainingChange
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import ROOT_TEXT, name_owners
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.text.words import counted, show_nbytes, show_nbytes_change

_MAX_GROUPS: Final = 3
_ROLES: Final = tuple(Role)
_IN_FULL: Final = {
    frozenset({"all_gather"}): ("DTensors", "gathered in full"),
    frozenset({"all_reduce"}): ("partial DTensors", "reduced"),
    frozenset({"all_gather", "all_reduce"}): ("DTensors", "gathered or reduced in full"),
}
"""By what makes DTensors whole: their names, and what happens to them."""


def sentence(step: TrainingChange | Step) -> str:
    """Tell a step, or what breaks training, in one line."""
    match step:
        case TrainingChange():
            return _of_training(step)
        case AxisRenamed() | Renamed() | Layers():
            return _of_names(step)
        case Counts():
            return _of_counts(step)
        case Sizes():
            loss = " and the loss" if step.with_loss else ""
            what = f"gradients[{step.axis}]" if step.axis else f"activations{loss}"
            return f"{what}: x{step.factor} bytes in each call"
        case Dtype():
            return _of_dtype(step)
        case Replaced():
            return _of_replaced(step)
    raise AssertionError(step)


def _of_names(step: AxisRenamed | Renamed | Layers) -> str:
    match step:
        case AxisRenamed() if step.is_alike:
            return f"mesh axis {step.old} is {step.new} now, over the same ranks"
        case AxisRenamed():
            return f"all that was sent over {step.old} is sent over {step.new} now"
        case Layers():
            what = ", each as its siblings" if step.new > step.old else ""
            modules = "modules" if step.has_units else "modules that send"
            return f"{step.prefix or ROOT_TEXT}: {step.old} -> {step.new} {modules}{what}"
    but_root = ", but for the parameters of the root" if step.keeps_root else ""
    if not step.old:
        return f"everything is below {step.new} now{but_root}"
    if not step.new:
        return f"what was below {step.old} is at the top now{but_root}"
    same = ", or another module with equal rows in its place" if step.is_leaf else ""
    return f"{step.old} is {step.new} now{same}"


def _of_counts(step: Counts) -> str:
    times = f"x{step.factor}"
    match step.scope:
        case Scope.EVERYTHING:
            return f"every count {times}"
        case Scope.FORWARD:
            named = name_owners(step.kept)
            kept = f"; {named} kept, and gathered as before" if step.kept else ""
            return f"counts of forward {times}, of backward x1{kept}"
        case Scope.ACTIVATIONS:
            return f"activations sent {step.factor} times as often"
        case Scope.OPTIMIZER:
            return f"all counts of the optimizer's phase {times}"
    what = "all counts of forward and backward"
    if step.reductions == step.factor:
        return f"{what} {times}"
    what = "forwards and backwards" if step.has_activations else what
    return f"{what} {times}, reductions of gradients x{step.reductions}"


def _of_dtype(step: Dtype) -> str:
    axes: defaultdict[str, list[str]] = defaultdict(list)
    for role, axis in sorted(step.parts, key=lambda part: (_ROLES.index(part[0]), part[1])):
        axes[role].append(axis)
    parts = ", ".join(f"{role}[{','.join(found)}]" for role, found in axes.items())
    where = f"{name_owners(step.owners)}: " if step.owners else ""
    nbytes = "as many" if step.factor == 1 else f"x{step.factor}"
    return f"{where}{parts} {step.old} -> {step.new}, {nbytes} bytes"


def _of_replaced(step: Replaced) -> str:
    who, facts = name_owners(step.owners), step.facts
    match step.kind:
        case "reduced times":
            counts = [{row.count for row in sent_rows(side)} for side in (step.was, step.rows)]
            often = f"{facts['times']} times as often"
            if all(len(side) == 1 for side in counts):
                often = "{} -> {} times".format(*chain(*counts))
            kinds = sorted({row.what for row in sent_rows(step.rows)})
            rest = ", gathers as before" if facts["is_sharded"] else ""
            return f"gradients of {who} reduced {often} ({', '.join(kinds)}){rest}"
        case "reduced" | "reduced by more":
            how, now = ("reduced", " now") if step.came else ("no longer reduced", "")
            if step.kind == "reduced by more":
                return f"gradients of {who} {how} by {_sums(step)} too{now}, all else as before"
            return f"gradients of {who} {how}{now} ({_sums(step)}), gathers as before"
        case "part reduced" | "gradient sizes":
            what = "gradients of"
            if step.kind == "part reduced":
                what = "another part of the gradients reduced, gathers as before:"
            sizes = {
                owner: max((largest(was[key]), largest(now[key])) for key in now if key.axis)
                for (owner, now), was in zip(step.rows.items(), step.was.values(), strict=True)
            }
            return f"{what} {_sizes(sizes)} in each call"
        case "buckets":
            numbers = {
                sum(call.count for call in row.calls if call.role == Role.GRADIENTS)
                for row in sent_rows(step.rows)
            }
            calls = "1 call" if numbers == {1} else f"{'/'.join(map(str, sorted(numbers)))} calls"
            return f"gradients of {who} sent in {calls}, as many bytes in all"
        case "sequence parallel":
            return _of_sequence_parallel(step)
        case "axis":
            if not step.came:
                return f"nothing is sent over {facts['axis']} any more"
            # All of it: what was there before the step only came there by the new name of an axis.
            return _with_calls(
                f"sent over {facts['axis']} now, over which nothing was",
                _calls(step, lambda key, _: key.axis == facts["axis"], is_new=True),
            )
        case "recomputed" if facts["is_moved"]:
            places = ("by recomputation", "in backward")
            now, before = places if step.came else places[::-1]
            return f"{who} gathered {now} instead of {before}"
        case "recomputed":
            if not step.came:
                return f"nothing of {who} is sent again by recomputation any more"
            what = f"forward collectives of {who} repeated by recomputation in backward"
            return f"{what}: {_calls(step)}"
        case "phase":
            sent = {key.phase for rows in step.rows.values() for key in rows}
            what = " and ".join(
                "the loss" if phase is Phase.OUTSIDE else phase
                for phase in facts["phases"]
                if phase in sent
            )
            if not step.came:
                return f"nothing is sent in {what} any more, forward as before"
            calls = _calls(step, lambda key, _: key.phase in facts["phases"])
            return _with_calls(f"{what} came, forward as before", calls)
        case "redistributed":
            source, _, target = facts["change"].partition("->")
            if not step.came:
                return f"{who} {facts['phase']}: no redistribution {source} -> {target} any more"
            return (
                f"{who} {facts['phase']}: redistributed {source} -> {target}, which sends "
                f"{_sums(step)}: {_calls(step)}"
            )
        case "gathered in full":
            keys = [key for rows in step.rows.values() for key in rows]
            tensors, how = _IN_FULL[
                frozenset(key.what for key in keys if key.subject == "collective")
            ]
            what = f"{who}: {facts['roles']}" if facts["roles"] else tensors
            outside = "outside of forward and backward"
            where = "in forward" if facts["phase"] is Phase.FORWARD else outside
            return f"{what} {how} {where}: {_calls(step, more='more')}"
        case "unit sizes":
            return f"other sizes of parameters: {_sizes(facts['sizes'])} in each gather"
        case "freed":
            how, more = "kept gathered after forward, not gathered in backward", "less"
            if step.came:
                how, more = "freed after forward, gathered again in backward", "more"
            return f"{who} {how}: {_calls(step, is_gather, more=more)}"
        case "gathered elsewhere":
            axes = {key.axis for held in step.rows.values() for key, rows in held.items() if rows}
            return f"{who} gathered over {', '.join(sorted(axes - {''}))} in backward now"
        case "used in backward":
            lost = "neither gathered nor reduced in backward any more"
            return f"{who} {'gathered and reduced in backward now' if step.came else lost}"
        case "gathered in backward":
            if not step.came:
                return f"{who} not gathered in backward any more"
            return _with_calls(f"{who} gathered in backward now", _calls(step, is_gather))
        case "sharded":
            how = "sharded instead of replicated: parameters gathered, gradients reduce-scattered"
            gone = "gradients all-reduced, parameters no longer gathered"
            return f"{who} {how if step.came else f'replicated instead of sharded: {gone}'}"
        case "split off":
            parts, wholes = name_owners(facts["modules"]), name_owners(facts["parents"])
            if not step.came:
                return f"{parts} merged into {wholes}, gathered with it"
            times = f", gathered {facts['times']} times in forward" if facts["times"] else ""
            calls = _calls(step, is_gather, facts["modules"])
            return _with_calls(f"{parts} split off {wholes}{times}", calls)
        case "regrouped":
            return (
                "other units, with as many bytes together: "
                f"{name_owners(facts['gone'])} -> {name_owners(facts['added'])}"
            )
        case "called":
            owners: defaultdict[int, list[Owner]] = defaultdict(list)
            for owner in step.owners:
                owners[facts["times"][owner]].append(owner)
            others = facts["others"]
            if owners.keys() == {others}:
                gathers = {
                    sum(row.count for row in sent_rows({at: held}) if row.phase is Phase.FORWARD)
                    for at, held in step.was.items()
                }
                was = "/".join(map(str, sorted(gathers)))
                return f"{who} gathered {was} -> {others} times in forward, as often as other units"
            shown = [
                f"{name_owners(some)} {_times(count)}" for count, some in sorted(owners.items())
            ]
            return f"gathered in forward: {', '.join(shown)}; other units {_times(others)}"
        case "unit":
            others = facts["others"]
            if not step.came:
                rest = f", other units gathered {others}" if others else ""
                return f"{who} no longer gathered{' nor reduced' * facts['is_reduced']}{rest}"
            rest = f", other units {others}" if others else ""
            return _with_calls(f"{who} gathered now{rest}", _calls(step, is_gather))
    raise AssertionError(step)


def _of_sequence_parallel(step: Replaced) -> str:
    facts, kinds = step.facts, ("all-reduces", "reduce-scatters")
    old, new = kinds if step.came else kinds[::-1]
    became = f"forward {old} became {new} of as many bytes"
    if facts["is_whole"]:
        is_on = "on" if step.came else "off"
        return f"sequence parallelism over {facts['axis']} {is_on}: {became}"
    sums = {sum_in_forward(kind, facts["axis"]) for kind in ("all_reduce", "reduce_scatter")}
    owners = [owner for owner, rows in step.rows.items() if not sums.isdisjoint(rows)]
    return f"{name_owners(owners)}[{facts['axis']}]: {became}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sums(step: Replaced) -> str:
    """The kinds of collectives of its rows: ``all_reduce[rep], reduce_scatter[dp]``."""
    return ", ".join(sorted({str(key) for held in step.rows.values() for key in held if key.axis}))


def _calls(
    step: Replaced,
    includes: Callable[[RowKey, Calls], bool] = lambda _key, _call: True,
    owners: Iterable[Owner] = (),
    *,
    is_new: bool = False,
    more: str = "",
) -> str:
    """How much more or less a rank sends: ``3 calls, 30.0 KiB in all``; empty if nothing is."""
    # Count and bytes, by the ranks of rows.
    amounts: defaultdict[tuple[int, ...], Volume] = defaultdict(Volume)
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
        in_all, count = "", abs(volume.count)
        # The bytes of some would read as those of all.
        if volume.nbytes and is_sized:
            size = show_nbytes(abs(volume.nbytes))
            in_all = f" of {size}" if count == 1 else f", {size} in all"
        return " ".join(filter(None, (f"{counted(count, 'call')}{in_all}", more)))

    everywhere = amounts.pop((), Volume())
    named = sorted(set(chain(*amounts)))
    ranks_of: defaultdict[Volume, list[int]] = defaultdict(list)
    for rank in named:
        of_rank = (amount for ranks, amount in amounts.items() if rank in ranks)
        ranks_of[sum(of_rank, everywhere)].append(rank)
    texts = [
        f"{amount_of(amount)} on {'each of ' * (len(ranks) > 1)}{name_ranks(ranks)}"
        for amount, ranks in ranks_of.items()
        if amount.count
    ]
    if len(texts) > _MAX_GROUPS:
        fewest, most = (choose(abs(one.count) for one in ranks_of) for choose in (min, max))
        least = f"{fewest} to " if fewest < most else ""
        texts = [f"{least}{counted(most, 'call')} on each of {name_ranks(named)}"]
    if everywhere.count:
        where = f" on each rank but {write_ranks(named)}" if named else ""
        texts.append(f"{amount_of(everywhere)}{where}")
    return ", ".join(texts)


def _with_calls(text: str, calls: str) -> str:
    return f"{text}: {calls}" if calls else text


def _sizes(sizes: Mapping[Owner, tuple[int, int]]) -> str:
    """Bytes before and after, the largest change first: ``layers.{0..2} 10.1 -> 40.2 KiB``."""
    # 0 where a module has several sizes.
    owners: dict[tuple[int, int], list[Owner]] = {}
    for owner, nbytes in sizes.items():
        owners.setdefault(nbytes, []).append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    shown = [
        f"{name_owners(some)} {show_nbytes_change(*nbytes) if all(nbytes) else 'resized'}"
        for nbytes, some in groups[:_MAX_GROUPS]
    ]
    more = len(groups) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more > 0 else ''}"


def _of_training(change: TrainingChange) -> str:
    who, over = name_owners(change.owners), " and ".join(change.axes)
    gradients, before, after = f"gradients of {who} are", change.before, change.after
    was, now = _amount(change.was), _amount(change.now)
    nbytes = f"{show_nbytes_change(change.was.nbytes, change.now.nbytes)} per rank"
    match change.problem:
        case "unsharded":
            return (
                f"parameters of {who} are no longer sharded: no unit gathers them, and their "
                f"gradients are no longer reduced over {over} ({was})"
            )
        case "unreduced":
            return f"{gradients} no longer reduced over {over}: {was}"
        case "part":
            fewer = f"fewer {gradients} reduced over {over}, gathers as before"
            return f"{fewer}: {counted(change.now.count, 'call')}, {nbytes}"
        case "passes":
            passes = f"{counted(int(after), 'backward')} instead of {before}"
            return f"gradients of {who} come from {passes}, forwards as before: {now} over {over}"
        case "ranks":
            return f"{gradients} reduced over {after} ranks instead of {before}: {now}"
        case "times":
            calls = f"{change.was.count} -> {change.now.count} calls"
            often = f"{before} -> {after} times per step"
            return f"{gradients} reduced {often} over {over}: {calls}, {nbytes}"
        case "backwards":
            where = "in the last backward now"
            if after:
                where = f"in {after.removesuffix(NOT_LAST)}, not in the last"
            instead = f", before in {before.removesuffix(NOT_LAST)}" if before else ""
            return f"{gradients} reduced {where}{instead}: {now} over {over}"
        case "reduce_op":
            how = f"combined by {after or 'sum'} instead of by {before or 'sum'}"
            return f"{gradients} {how} over {over}: {now}"
        case "dtype":
            return f"{gradients} reduced over {over} in {after} instead of {before}: {now}"


def _amount(volume: Volume) -> str:
    return f"{counted(volume.count, 'call')}, {show_nbytes(volume.nbytes)} per rank"


def timing_sentence(change: TimingChange) -> str:
    """Tell a change of when calls are issued."""
    what = f"{name_owners(change.owners)} {change.key.phase}: {change.key}"
    if change.subject == "ahead":
        before, after = (
            " or ".join(str(value) for value, _ in shares)
            for shares in (change.before, change.after)
        )
        return f"{what} issued {before} -> {after} units ahead of use"
    last, share = change.after[-1]
    if len(change.after) > 1:
        return f"{what} asynchronous in {share} of its calls now"
    if last:
        return f"{what} asynchronous now (async_op=True)"
    return f"{what} synchronous now: the caller waits for it"
