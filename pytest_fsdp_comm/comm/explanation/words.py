"""Put modules, calls and sizes into words, for the sentences of steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Volume
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.states import Owner
from pytest_fsdp_comm.comm.explanation.steps import Replaced
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.text.words import join_first, show_count, show_nbytes, show_nbytes_change

_MAX_GROUPS: Final = 3
_PHASES: Final[Mapping[str, str]] = {
    Phase.OUTSIDE: "outside forward and backward",
    Phase.OPTIMIZER: "in the optimizer phase",
}
_NUMBERS: Final = re.compile(r"[0-9{},.]+")


def name_modules(owners: Collection[Owner], *, most: int = 3) -> str:
    """Name modules like `name_owners`, but put ``module`` before bare numbers."""
    text = name_owners(owners, most=most)
    is_counted = text.partition(" ")[2].startswith("modules ")
    if is_counted or not any(map(_NUMBERS.fullmatch, text.split(", "))):
        return text
    return f"{'module' if len(owners) == 1 else 'modules'} {text}"


def name_with_phase(owners: Collection[Owner], phase: Phase | str) -> str:
    """Name modules and a phase: ``layers.{0..2} in forward``."""
    return f"{name_modules(owners)} {name_phase(phase)}"


def name_phase(phase: Phase | str) -> str:
    """Name a phase with its preposition: ``in forward``, ``outside forward and backward``."""
    return _PHASES.get(phase, f"in {phase}")


def name_times(count: int) -> str:
    """Return ``once``, or ``4 times``."""
    return "once" if count == 1 else f"{count} times"


def name_factor(factor: Fraction | int) -> str:
    """Return ``twice``, ``half``, ``3/2 times`` or ``1/4``, to go before ``as many``."""
    if factor == 2:  # noqa: PLR2004  # has a word of its own
        return "twice"
    if factor == Fraction(1, 2):
        return "half"
    return f"{factor} times" if factor > 1 else str(factor)


def name_operations(step: Replaced) -> str:
    """Name the kinds and axes of a step's collectives: ``all_reduce[rep], reduce_scatter[dp]``."""
    return ", ".join(sorted({str(key) for rows in step.rows.values() for key in rows if key.axis}))


def describe_calls(
    step: Replaced,
    recordings: Recordings,
    includes: Callable[[RowKey, Calls], bool] = lambda _key, _call: True,
    *,
    owners: Iterable[Owner] = (),
    is_new: bool = False,
    is_change: bool = False,
) -> str:
    """Describe added calls in the rows of a step: ``3 calls, 30.0 KiB in total``; may be empty.

    With `is_change`, add signs: ``+3 calls, +30.0 KiB``. With `is_new`, do not subtract old calls.
    """
    amounts: defaultdict[tuple[int, ...], Volume] = defaultdict(Volume)  # keyed by ranks
    is_sized = True
    signs = (1,) if is_new else (1, -1)
    for owner in owners or step.owners:
        for key in step.rows.get(owner, {}):
            for sign, state in zip(signs, reversed(recordings.states), strict=False):
                for row in state[owner].row(key) if key.subject == "collective" else ():
                    for call in filter(partial(includes, key), row.calls):
                        count = sign * call.count
                        amounts[row.ranks] += Volume(count=count, nbytes=count * call.nbytes)
                        is_sized &= not call.lacks_size

    def write_amount(volume: Volume) -> str:
        calls, size = show_count(abs(volume.count), "call"), show_nbytes(abs(volume.nbytes))
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
        f"{write_amount(volume)} on {'each of ' if len(ranks) > 1 else ''}{name_ranks(ranks)}"
        for volume, ranks in ranks_by_amount.items()
        if volume.count
    ]
    if len(texts) > _MAX_GROUPS:
        counts = [abs(volume.count) for volume in ranks_by_amount]
        least = f"{min(counts)} to " if min(counts) < max(counts) else ""
        texts = [
            f"{least}{show_count(max(counts), 'call')} on each of {name_ranks(ranks_with_rows)}"
        ]
    if everywhere.count:
        where = f" on each rank except {write_ranks(ranks_with_rows)}" if ranks_with_rows else ""
        texts.append(f"{write_amount(everywhere)}{where}")
    return ", ".join(texts)


def add_calls(text: str, calls: str) -> str:
    """Append the text of `describe_calls`, if there is any."""
    return f"{text}: {calls}" if calls else text


def describe_sizes(sizes: Mapping[Owner, tuple[int, int]]) -> str:
    """Format old and new sizes, largest change first: ``layers.{0..2} 10.1 -> 40.2 KiB``."""
    # The bytes are 0 for modules whose calls have several sizes.
    owners: dict[tuple[int, int], list[Owner]] = {}
    for owner, nbytes in sizes.items():
        owners.setdefault(nbytes, []).append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    texts = [
        f"{name_modules(group)} {show_nbytes_change(*nbytes) if all(nbytes) else 'resized'}"
        for nbytes, group in groups
    ]
    return join_first(texts, _MAX_GROUPS)


def describe_volume(volume: Volume) -> str:
    """Describe one rank's calls: ``3 calls, 30.4 KiB per rank``."""
    return f"{show_count(volume.count, 'call')}, {show_nbytes(volume.nbytes)} per rank"
