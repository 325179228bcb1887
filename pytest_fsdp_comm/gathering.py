"""Collects a value from every rank, or says that the ranks are at different comparisons."""

from __future__ import annotations

import json
import typing
from dataclasses import is_dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fsdp_comm.errors import RanksDivergedError
from pytest_fsdp_comm.text.codec import from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Value = TypeVar("_Value")

# Note [Exchanged lines]: ranks differ little; most have the same, others the same but for a few
# rows. So a text has each entry of a value's tuples on a line of its own, and each text, and each
# line, is read once: equal entries of different ranks are one object, which merging tells apart by
# identity. The first line is a list of the label, the value without these entries, and how many
# lines each tuple has.


def gather_alike(gather: Callable[[str], list[str]], label: str, value: _Value) -> list[_Value]:
    """Exchange values of one class, in rank order; raise RanksDivergedError if labels differ."""
    kinds = _kinds_of_entries(type(value))
    data = to_json(value)
    entries = {name: data.pop(name) for name in kinds}
    counts = {name: len(listed) for name, listed in entries.items()}
    lines = ([label, data, counts], *(entry for listed in entries.values() for entry in listed))
    texts = gather("\n".join(json.dumps(line, separators=(",", ":")) for line in lines))
    readers = {name: cache(partial(_read_entry, kind)) for name, kind in kinds.items()}
    # Values of equal texts are one object, and so are equal entries of tuples of different ones.
    values: dict[str, _Value] = {}
    others: set[str] = set()
    for text in dict.fromkeys(texts):
        head, *rest = text.split("\n")
        found, data, counts = json.loads(head)
        if found == label:
            values[text] = _read(type(value), data, counts, rest, readers)
        else:
            others.add(found)
    if others:
        raise RanksDivergedError(
            f"this rank compared {label} with a snapshot, another rank compared "
            f"{', '.join(sorted(others))}; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
    return [values[text] for text in texts]


def _kinds_of_entries(cls: type) -> dict[str, Any]:
    """The classes of what the tuples of any length in a dataclass hold, by their names."""
    hints = typing.get_type_hints(cls) if is_dataclass(cls) else {}
    return {
        name: typing.get_args(hint)[0]
        for name, hint in hints.items()
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis
    }


def _read_entry(kind: Any, line: str) -> Any:
    return from_json(kind, json.loads(line))


def _read(
    cls: type[_Value],
    data: Any,
    counts: Mapping[str, int],
    lines: list[str],
    readers: Mapping[str, Callable[[str], Any]],
) -> _Value:
    if not readers:
        return from_json(cls, data)
    value = from_json(cls, {**data, **{name: [] for name in readers}})
    rest = iter(lines)
    entries = {
        name: tuple(map(readers[name], islice(rest, count))) for name, count in counts.items()
    }
    return replace(value, **entries)  # type: ignore[type-var]  # only dataclasses have entries
