"""Says which rank waits for which, from where each is in the order of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def explain_waiting(
    positions: Mapping[int, dict[str, Any]], *, blamed: Sequence[int] = ()
) -> list[str]:
    """Explains a hang.

    Args:
        positions: As `position.read_position`, by rank, with ``is_over`` where a rank had finished
            the test, and ``is_silent`` where nothing but ``site`` is known. Dead ranks are missing.
        blamed: Ranks that are known to have failed.

    Returns:
        A line like ``all wait for rank 3, at model.py:90 in forward`` where that is known; then
        lines like ``ranks 0-1 wait in all_gather #7 of dp for layers.3 (512 B) at model.py:88`` and
        ``rank 3 never issued it, and is at model.py:90``. Empty if no rank waits, or all wait for
        blamed ones.
    """
    lines: list[str] = []
    waiting: set[int] = set()
    absent: set[int] = set()
    for name in _group_names(positions):
        entries = {
            rank: {entry["seq"]: entry for entry in group["entries"]}
            for rank, position in positions.items()
            for group in position["groups"]
            if group["name"] == name
        }
        waited_for = [
            entry["seq"]
            for by_seq in entries.values()
            for entry in by_seq.values()
            if not entry["is_done"]
        ]
        if waited_for:
            seq = min(waited_for)
            lines += _explain_one(name, seq, entries, positions)
            waits = {r for r, own in entries.items() if seq in own and not own[seq]["is_done"]}
            waiting |= waits
            absent |= {*_described(name, positions)[1]} - waits
    guilty = absent - waiting
    if guilty and guilty <= set(blamed):
        return []
    return [*_cause(guilty, positions), *lines]


def _cause(guilty: set[int], positions: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Those that are waited for and wait for nobody: the rest is their echo."""
    told = {}
    for rank in guilty:
        position = positions.get(rank)
        if position is None:
            told[rank] = ", which is dead"
        elif position.get("is_silent"):
            told[rank] = f", which does not let go of the GIL{_at(position)}"
        else:
            told[rank] = _at(position, ",").replace(", and", ", which")
    for ranks, text in fold_equal(told):
        yield f"all wait for {name_ranks(ranks)}{text if len(ranks) == 1 else _plural(text)}"


def _plural(text: str) -> str:
    for one, several in (
        (", and is at", ", and are at"),
        ("and has ended", "and have ended"),
        ("which has ended", "which have ended"),
        ("which is dead", "which are dead"),
        ("which does not", "which do not"),
        ("(its last", "(their last"),
    ):
        text = text.replace(one, several)
    return text


def _explain_one(
    name: str,
    seq: int,
    entries: Mapping[int, Mapping[int, dict[str, Any]]],
    positions: Mapping[int, dict[str, Any]],
) -> Iterator[str]:
    axis, members = _described(name, positions)
    waiting = {
        rank: by_seq[seq]
        for rank, by_seq in entries.items()
        if seq in by_seq and not by_seq[seq]["is_done"]
    }
    sizes = {entry["nbytes"] for entry in waiting.values()}
    told = {
        rank: f"wait in {entry['kind']} #{seq} of {axis}{_module(positions[rank])} "
        f"({show_nbytes(entry['nbytes'])}){_at(positions[rank])}"
        for rank, entry in waiting.items()
    }
    for ranks, text in fold_equal(told):
        verb = text if len(ranks) > 1 else text.replace("wait ", "waits ", 1)
        yield f"{name_ranks(ranks)} {verb}"
    if len({entry["kind"] for entry in waiting.values()}) > 1:
        yield f"  these differ: #{seq} of {axis} has to be the same collective on every rank"
    elif len(sizes) > 1:
        yield f"  the sizes differ: #{seq} of {axis} has to be of one shape on every rank"
    absent = {}
    for rank in members or sorted(entries):
        if rank in waiting or rank not in positions or positions[rank].get("is_silent"):
            continue
        own = entries.get(rank, {})
        if seq in own:
            absent[rank] = f"finished it{_at(positions[rank], ', and is')}"
        else:
            last = max(own, default=0)
            before = f" (its last of {axis} was {own[last]['kind']} #{last})" if last else ""
            absent[rank] = f"never issued it{before}{_at(positions[rank], ', and is')}"
    for ranks, text in fold_equal(absent):
        yield f"{name_ranks(ranks)} {text if len(ranks) == 1 else _plural(text)}"


def _group_names(positions: Mapping[int, dict[str, Any]]) -> list[str]:
    names = (group["name"] for position in positions.values() for group in position["groups"])
    return list(dict.fromkeys(names))


def _described(name: str, positions: Mapping[int, dict[str, Any]]) -> tuple[str, list[int]]:
    """What people call a group, and its ranks."""
    found = next(
        group
        for position in positions.values()
        for group in position["groups"]
        if group["name"] == name
    )
    members: list[int] = found["ranks"]
    description: str = found["description"]
    if description == "default_pg":
        return "world", members
    if description and description != "undefined":
        return description.removeprefix("mesh_"), members
    return f"the group of {name_ranks(members)}" if members else "a group", members


def _module(position: Mapping[str, Any]) -> str:
    return f" for {position['module']}" if position["module"] else ""


def _at(position: Mapping[str, Any], joint: str = "") -> str:
    if position.get("is_over"):
        return ", and has ended the test" if joint else ""
    return f"{joint} at {position['site']}" if position["site"] else ""
