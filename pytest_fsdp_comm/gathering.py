"""Collects a value from every rank, or says that the ranks are at different comparisons.

Ranks differ little: most have the same, others the same but for a few rows. So a text has each
entry of a value's tuples on a line of its own, and each text, and each line, is read once.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pytest_fsdp_comm.errors import RanksDivergedError
from pytest_fsdp_comm.text.codec import dump_document, from_json, load_document, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Value = TypeVar("_Value")

_KIND: Final = "exchange"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """The first line of what one rank gives to the others."""

    label: str
    value: Any
    """As `to_json` makes it, with empty tuples: its class is not known before the labels are
    compared."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many of the lines below are entries of each tuple, in this order."""


class _Entries(dict[str, Any]):
    """The entries of one tuple, by their lines; equal lines are one object."""

    def __init__(self, kind: Any, where: str) -> None:
        """Starts without entries: each is read when its line is first looked up.

        Args:
            kind: The class of the entries.
            where: What they are, to begin an error with.
        """
        super().__init__()
        self._kind, self._where = kind, where

    def __missing__(self, line: str) -> Any:
        self[line] = entry = from_json(self._kind, json.loads(line), where=self._where)
        return entry


def gather_alike(gather: Callable[[str], list[str]], label: str, value: _Value) -> list[_Value]:
    """Exchanges values of one class with the other ranks.

    Args:
        gather: The exchange, from this rank's text to those of all recorded ranks.
        label: What the value is, in one line, e.g. ``comm_mode``.
        value: This rank's value, of a class that the codec knows.

    Returns:
        The values in rank order; those of equal texts are one object, and so are equal entries of
        tuples of different ones.

    Raises:
        RanksDivergedError: Another rank exchanged something else.
    """
    kinds = _kinds_of_entries(type(value))
    texts = gather(_written(label, value, kinds))
    known = {name: _Entries(kind, f"{label}.{name}") for name, kind in kinds.items()}
    values: dict[str, _Value] = {}
    others: set[str] = set()
    for text in dict.fromkeys(texts):
        head, _, body = text.partition("\n")
        message = load_document(_Message, _KIND, _VERSION, head)
        if message.label == label:
            values[text] = _read(type(value), message, body, known)
        else:
            others.add(message.label)
    if others:
        raise RanksDivergedError(
            f"this rank compared {label} with a snapshot, another rank compared "
            f"{', '.join(sorted(others))}; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
    return [values[text] for text in texts]


def _kinds_of_entries(cls: type) -> dict[str, Any]:
    """The classes of what the tuples of any length in a dataclass hold, by the names of these."""
    hints = typing.get_type_hints(cls) if is_dataclass(cls) else {}
    return {
        name: typing.get_args(hint)[0]
        for name, hint in hints.items()
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis
    }


def _written(label: str, value: object, kinds: Mapping[str, Any]) -> str:
    data = to_json(value)
    entries = {name: data[name] for name in kinds}
    message = _Message(
        label=label,
        value={**data, **dict.fromkeys(entries, ())} if entries else data,
        counts={name: len(listed) for name, listed in entries.items()},
    )
    lines = (
        json.dumps(entry, separators=(",", ":")) for listed in entries.values() for entry in listed
    )
    return "\n".join([dump_document(_KIND, _VERSION, message), *lines])


def _read(cls: type[_Value], message: _Message, body: str, known: Mapping[str, _Entries]) -> _Value:
    value = from_json(cls, message.value, where=message.label)
    if not known:
        return value
    lines = iter(body.split("\n"))
    entries = {
        name: tuple(map(known[name].__getitem__, islice(lines, count)))
        for name, count in message.counts.items()
    }
    return replace(value, **entries)  # type: ignore[type-var]  # only dataclasses have entries
