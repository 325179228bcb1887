"""Declare each compared field of a call once: how to compute it, and how snapshots write it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from pytest_fsdp_comm.comm.events import Collective, Source
from pytest_fsdp_comm.text.fqn import write_word

# To add a field to snapshots, declare it in `Calls`, with a default for snapshots that lack it. The
# writer and the reader of snapshots use `CALL_WORDS`, and rows are compared by all fields.

_WORD: Final = "word"
NOT_LAST: Final = " but not the last"
_COUNT: Final = r"[1-9][0-9]{0,5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWord:
    """How to compute, write and read one field of `Calls`."""

    text: str
    """The field's text in a snapshot, with ``{}`` for the value; default values are not written."""
    getter: Callable[[Collective], Any]
    value_pattern: str = ""
    """Regular expression for the value; empty for a flag."""
    value_type: type = int
    is_timing: bool = False
    """Whether the field describes when a call is issued, which depends on the order of units."""

    @property
    def name(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def pattern(self) -> str:
        """Regular expression for the text; its group captures the value, or the entire flag."""
        prefix, placeholder, _ = self.text.partition("{")
        escaped = re.escape(prefix)
        return f"{escaped}({self.value_pattern})" if placeholder else f"({escaped})"

    def read(self, text: str) -> Any:
        """Convert `text`, which the group in `pattern` matched, into a value."""
        return self.value_type(text) if self.value_pattern else True


def _word(default: Any, text: str, getter: Callable[[Collective], Any], **options: Any) -> Any:
    word = CallWord(text=text, getter=getter, value_type=type(default), **options)
    return field(default=default, metadata={_WORD: word})


def _peer_distance(event: Collective) -> int:
    # Count the shorter way around the group, so that each pipeline stage sends to +1 and receives
    # from -1, however many ranks there are.
    peer, size = event.peer or 0, event.group_size
    return peer - size if peer > size / 2 else peer


def _reduce_op_of_user(event: Collective) -> str:
    is_written = event.source is Source.USER and event.reduce_op not in {None, "sum"}
    return str(event.reduce_op) if is_written else ""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Calls:
    """One rank's calls that have the same value in every compared field."""

    nbytes: int = 0
    """Message size of each call, in bytes; 0 if `lacks_size`."""
    dtype: str = ""
    """The `events.Collective.dtype`; empty for objects."""
    role: str = ""
    """The `events.Collective.role`, or an empty string if it is None."""
    is_object: bool = False
    """Whether the calls carry pickled objects, whose size depends on values and paths."""
    is_unsized: bool = False
    """Whether the calls carry activations whose size is not compared."""
    ahead: int = _word(
        0, "ahead {}", lambda event: event.ahead or 0, value_pattern=_COUNT, is_timing=True
    )
    """The `events.Collective.ahead`, or 0 if it is None."""
    is_async: bool = _word(
        default=False, text="async", getter=lambda event: event.is_async is True, is_timing=True
    )
    """Whether the caller must wait for each call; False if torch does not report it."""
    peer: int = _word(0, "peer {:+}", _peer_distance, value_pattern=f"[+-]{_COUNT}")
    """Distance to the other rank of a send or receive within the group, the shorter way around: 1
    is the next rank, -1 the previous rank. 0 for other kinds, and if unknown."""
    root_rank: int = _word(
        -1,
        "root {}",
        lambda event: -1 if event.root_rank is None else event.root_rank,
        value_pattern=f"0|{_COUNT}",
    )
    """The `events.Collective.root_rank`, or -1 if it is None."""
    reduce_op: str = _word(
        "",
        "by {}",
        _reduce_op_of_user,
        value_pattern="avg|product|min|max|band|bor|bxor|premul_sum",
    )
    """The `events.Collective.reduce_op` of calls from user code; empty for a sum. Always empty for
    FSDP, DDP and DTensor, whose operation depends on the backend."""
    backwards: str = _word(
        "",
        "in {}",
        lambda _: "",
        value_pattern=rf"(?:the first|the last|{_COUNT}) of {_COUNT} backwards(?:{NOT_LAST})?",
        is_timing=True,
    )
    """The backward passes in which these calls reduce gradients; empty if they do so in every pass
    that computes these gradients. See Note [Comparable]."""
    count: int = 0
    """Number of calls; 0 in an object that only serves as a key for equal calls."""

    @property
    def lacks_last(self) -> bool:
        """Whether the gradients of the last backward pass are not reduced."""
        return self.backwards.startswith("the first") or self.backwards.endswith(NOT_LAST)

    @property
    def lacks_size(self) -> bool:
        return self.is_object or self.is_unsized

    @classmethod
    def of(cls, event: Collective, backwards: str = "") -> Calls:
        """Return the compared fields of one call, with a count of 0."""
        is_object = event.source is Source.OBJECT
        return cls(
            nbytes=0 if is_object else event.nbytes,
            dtype="" if is_object else event.dtype,
            role="" if event.role is None else event.role.value,
            is_object=is_object,
            **{name: word.getter(event) for name, word in CALL_WORDS.items()}
            | {"backwards": backwards},
        )

    def __str__(self) -> str:
        """Write the calls as in a snapshot: ``x2 of 64 B float32 parameters ahead 1``."""
        words = [f"x{self.count}"]
        if self.is_object:
            words.append("of objects")
        elif self.is_unsized:
            words += [f"of {write_word(self.dtype)}"] if self.dtype else []
        elif self.nbytes or self.dtype:
            words.append(f"of {self.nbytes:_} B")
            words += [write_word(self.dtype)] if self.dtype else []
        words += [self.role] if self.role else []
        for name, word in CALL_WORDS.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                words.append(word.text.format(value))
        return " ".join(words)


CALL_WORDS: Final[dict[str, CallWord]] = {
    entry.name: entry.metadata[_WORD] for entry in fields(Calls) if _WORD in entry.metadata
}
"""How to write each field, keyed by field name, in the order that snapshots use."""
_DEFAULTS: Final = {entry.name: entry.default for entry in fields(Calls)}
UNTIMED: Final[dict[str, Any]] = {
    name: _DEFAULTS[name] for name, word in CALL_WORDS.items() if word.is_timing
}
"""Defaults of the timing fields. Reset the fields to them to ignore when calls are issued."""
