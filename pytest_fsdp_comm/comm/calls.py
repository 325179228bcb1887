"""The compared fields of one call, each declared once with its source and its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from pytest_fsdp_comm.comm.events import Collective, Source
from pytest_fsdp_comm.text.fqn import write_word

# Note [Fields of a call]: a row counts the calls that are alike, the snapshot's writer and reader
# take their words from here, and whatever compares or explains rows hands the values on whole. So a
# new field is one declaration, a default that older snapshots read as, and no change elsewhere.

_WORD: Final = "word"
NOT_LAST: Final = " but not the last"
_COUNT: Final = r"[1-9][0-9]{0,5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWord:
    """How one field of `Calls` is counted, written and read."""

    text: str
    """What a snapshot has where the value is not the default; with ``{}`` for the value."""
    of: Callable[[Collective], Any]
    value: str = ""
    """The pattern of the value; empty for a flag."""
    kind: type = int
    """Makes the value of what `value` matches."""
    is_timing: bool = False
    """Whether it is about when a call is issued, which follows from the order of units."""

    @property
    def name(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def pattern(self) -> str:
        """What matches the text, with a group for the value, or for all of a flag."""
        before, placeholder, _ = self.text.partition("{")
        return f"{re.escape(before)}({self.value})" if placeholder else f"({re.escape(before)})"

    def read(self, matched: str) -> Any:
        """The value that the group of `pattern` stands for."""
        return self.kind(matched) if self.value else True


def _word(default: Any, text: str, of: Callable[[Collective], Any], **declared: Any) -> Any:
    word = CallWord(text=text, of=of, kind=type(default), **declared)
    return field(default=default, metadata={_WORD: word})


def _shorter_way(event: Collective) -> int:
    # Of pipelines, each stage sends by +1 and receives by -1, however many ranks there are.
    peer, size = event.peer or 0, event.group_size
    return peer - size if peer > size / 2 else peer


def _users_reduction(event: Collective) -> str:
    is_shown = event.source is Source.USER and event.reduce_op not in {None, "sum"}
    return str(event.reduce_op) if is_shown else ""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Calls:
    """Calls of one rank that are equal in all compared fields."""

    nbytes: int = 0
    """Message size of each, in bytes; 0 if it `lacks_size`."""
    dtype: str = ""
    """As `events.Collective.dtype`; empty for objects."""
    role: str = ""
    """As `events.Collective.role`; empty where that is None."""
    is_object: bool = False
    """Whether they carry pickled objects, whose size depends on values and paths."""
    is_unsized: bool = False
    """Whether they carry activations whose size is not compared."""
    ahead: int = _word(
        0,
        "ahead {}",
        lambda event: event.ahead or 0,
        value=_COUNT,
        is_timing=True,
    )
    """As `events.Collective.ahead`; 0 where that is None."""
    is_async: bool = _word(
        default=False, text="async", of=lambda event: event.is_async is True, is_timing=True
    )
    """Whether the caller has to wait for each; False where torch does not say."""
    peer: int = _word(0, "peer {:+}", _shorter_way, value=f"[+-]{_COUNT}")
    """The distance to the other rank of a send or a receive within the group, the shorter way
    around: 1 for the next rank, -1 for the one before. 0 for other kinds, and where none is
    known."""
    root_rank: int = _word(
        -1,
        "root {}",
        lambda event: -1 if event.root_rank is None else event.root_rank,
        value=f"0|{_COUNT}",
    )
    """As `events.Collective.root_rank`; -1 where that is None."""
    reduce_op: str = _word(
        "",
        "by {}",
        _users_reduction,
        value="avg|product|min|max|band|bor|bxor|premul_sum",
    )
    """As `events.Collective.reduce_op` where user code reduces otherwise than by a sum; else empty.
    FSDP and DDP sum on some backends and average on others."""
    backwards: str = _word(
        "",
        "in {}",
        lambda _: "",
        value=rf"(?:the first|the last|{_COUNT}) of {_COUNT} backwards(?:{NOT_LAST})?",
        is_timing=True,
    )
    """In which backward passes the row reduces gradients; empty if in all that compute them. See
    Note [Comparable]."""
    count: int = 0
    """How many there are; 0 for what each of them is, however many there are."""

    @property
    def lacks_last(self) -> bool:
        """Whether gradients that the last backward computes are not reduced."""
        return self.backwards.startswith("the first") or self.backwards.endswith(NOT_LAST)

    @property
    def lacks_size(self) -> bool:
        return self.is_object or self.is_unsized

    @classmethod
    def of(cls, event: Collective, backwards: str = "") -> Calls:
        """What one call is; its count is 0."""
        is_object = event.source is Source.OBJECT
        return cls(
            nbytes=0 if is_object else event.nbytes,
            dtype="" if is_object else event.dtype,
            role="" if event.role is None else event.role.value,
            is_object=is_object,
            **{name: word.of(event) for name, word in CALL_WORDS.items()}
            | {"backwards": backwards},
        )

    def __str__(self) -> str:
        """As in a snapshot: ``x2 of 64 B float32 parameters ahead 1``."""
        words = [f"x{self.count}"]
        if self.is_object:
            words.append("of objects")
        elif self.is_unsized:
            words += [f"of {write_word(self.dtype)}"] if self.dtype else []
        elif self.nbytes or self.dtype:
            words.append(f"of {self.nbytes:_} B")
            words += [write_word(self.dtype)] if self.dtype else []
        words += [self.role] if self.role else []
        for name, value in self.told():
            words.append(CALL_WORDS[name].text.format(value))
        return " ".join(words)

    def told(self) -> list[tuple[str, int]]:
        """The fields of `CALL_WORDS` whose value is not the default."""
        values = [(name, getattr(self, name)) for name in CALL_WORDS]
        return [(name, value) for name, value in values if value != _DEFAULTS[name]]


CALL_WORDS: Final[dict[str, CallWord]] = {
    one.name: one.metadata[_WORD] for one in fields(Calls) if _WORD in one.metadata
}
"""By the names of fields, in the order in which they are written."""
_DEFAULTS: Final = {one.name: one.default for one in fields(Calls)}
UNTIMED: Final[dict[str, Any]] = {
    name: _DEFAULTS[name] for name, word in CALL_WORDS.items() if word.is_timing
}
"""The values of calls of which it is left out when they are issued."""
