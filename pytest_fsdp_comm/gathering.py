"""Collects a value from every rank, or says that the ranks are at different comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pytest_fsdp_comm.errors import RanksDivergedError
from pytest_fsdp_comm.text.codec import dump_document, from_json, load_document, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")

_KIND: Final = "exchange"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What one rank gives to the others."""

    label: str
    value: Any
    """As `to_json` makes it: its class is not known before the labels are compared."""


def gather_alike(gather: Callable[[str], list[str]], label: str, value: _Value) -> list[_Value]:
    """Exchanges values of one class with the other ranks.

    Args:
        gather: The exchange, from this rank's text to those of all recorded ranks.
        label: What the value is, in one line, e.g. ``comm_mode``.
        value: This rank's value, of a class that the codec knows.

    Returns:
        The values in rank order; those of equal texts are one object.

    Raises:
        RanksDivergedError: Another rank exchanged something else.
    """
    texts = gather(dump_document(_KIND, _VERSION, _Message(label=label, value=to_json(value))))
    values: dict[str, _Value] = {}
    others: set[str] = set()
    # Most ranks have the same, which may be large: each text is read once, and what JSON makes of
    # one is dropped before the next.
    for text in dict.fromkeys(texts):
        message = load_document(_Message, _KIND, _VERSION, text)
        if message.label == label:
            values[text] = from_json(type(value), message.value, where=label)
        else:
            others.add(message.label)
    if others:
        raise RanksDivergedError(
            f"this rank compared {label} with a snapshot, another rank compared "
            f"{', '.join(sorted(others))}; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
    return [values[text] for text in texts]
