"""Define which fields of calls are compared, and how snapshots write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from pytest_fsdp_comm.comm.events import Collective, Source
from pytest_fsdp_comm.text.fqn import write_word

# To add a field to snapshots, you only need to declare it in `Calls` with `_make_word_field`,
# because the writer and the reader of snapshots use `CALL_WORDS`, and rows are compared by all
# fields. If a snapshot lacks the field, the reader uses the default.

_WORD: Final = "word"
NOT_LAST: Final = " but not the last"
_COUNT: Final = r"[1-9][0-9]{0,5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWord:
    """How to compute a field of `Calls` from a collective, and how snapshots write and read it."""

    text: str
    """The field's text in a snapshot, with ``{}`` for the value. Snapshots omit default values."""
    getter: Callable[[Collective], Any]
    value_pattern: str = ""
    """Regular expression that matches the value; empty for a flag, which has no value."""
    value_type: type = int
    is_timing: bool = False
    """Whether the field describes when calls are issued, not what they send; see `UNTIMED`."""

    @property
    def name(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def pattern(self) -> str:
        """Regular expression for `text`; the group captures the value, or the text of a flag."""
        prefix, placeholder, _ = self.text.partition("{")
        escaped = re.escape(prefix)
        return f"{escaped}({self.value_pattern})" if placeholder else f"({escaped})"

    def read(self, text: str) -> Any:
        """Convert `text`, which the group in `pattern` captured, into a value."""
        return self.value_type(text) if self.value_pattern else True


def _make_word_field(
    default: Any, text: str, getter: Callable[[Collective], Any], **options: Any
) -> Any:
    word = CallWord(text=text, getter=getter, value_type=type(default), **options)
    return field(default=default, metadata={_WORD: word})


def _peer_distance(event: Collective) -> int:
    # Take the shorter way around the group. Then each pipeline stage sends to +1 and receives from
    # -1, whatever the size of the group.
    peer, size = event.peer or 0, event.group_size
    return peer - size if peer > size / 2 else peer


def _reduce_op_of_user(event: Collective) -> str:
    is_written = event.source is Source.USER and event.reduce_op not in {None, "sum"}
    return str(event.reduce_op) if is_written else ""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Calls:
    """Calls of one rank that are equal in every compared field, and how many there are."""

    nbytes: int = 0
    """Message size of each call, in bytes; 0 if `lacks_size`."""
    dtype: str = ""
    """`events.Collective.dtype`; empty if the calls send pickled objects."""
    role: str = ""
    """`events.Collective.role`, or an empty string if that is None."""
    is_object: bool = False
    """Whether the calls send pickled objects, whose size varies with their contents."""
    is_unsized: bool = False
    """Whether the calls send activations whose sizes are not compared."""
    ahead: int = _make_word_field(
        0, "ahead {}", lambda event: event.ahead or 0, value_pattern=_COUNT, is_timing=True
    )
    """`events.Collective.ahead`, or 0 if that is None."""
    is_async: bool = _make_word_field(
        default=False, text="async", getter=lambda event: event.is_async is True, is_timing=True
    )
    """Whether the calls are asynchronous (``async_op=True``); False if torch does not report it."""
    peer: int = _make_word_field(0, "peer {:+}", _peer_distance, value_pattern=f"[+-]{_COUNT}")
    """For sends and receives, the distance to the other rank, taking the shorter way around the
    group: 1 is the next rank, -1 the previous one. 0 for other kinds and unknown ranks."""
    root_rank: int = _make_word_field(
        -1,
        "root {}",
        lambda event: -1 if event.root_rank is None else event.root_rank,
        value_pattern=f"0|{_COUNT}",
    )
    """`events.Collective.root_rank`, or -1 if that is None."""
    reduce_op: str = _make_word_field(
        "",
        "by {}",
        _reduce_op_of_user,
        value_pattern="avg|product|min|max|band|bor|bxor|premul_sum",
    )
    """The reduction op of calls from user code, such as ``avg``; empty for a sum. Always empty for
    calls of FSDP, DDP and DTensor, because their op depends on the backend."""
    backwards: str = _make_word_field(
        "",
        "in {}",
        lambda _: "",
        value_pattern=rf"(?:the first|the last|{_COUNT}) of {_COUNT} backwards(?:{NOT_LAST})?",
        is_timing=True,
    )
    """The backward passes that issue these calls, such as ``the last of 4 backwards``. Empty if
    every pass that computes the gradients also reduces them. See Note [Comparable]."""
    exposed: bool = _make_word_field(
        default=False, text="exposed", getter=lambda event: event.exposed is True, is_timing=True
    )
    """Whether nothing can hide the calls; False if the recording does not show overlap."""
    count: int = 0
    """Number of calls; 0 in a `Calls` that is only used as a dictionary key."""

    @property
    def lacks_last(self) -> bool:
        """Whether the last backward pass issues none of these calls."""
        return self.backwards.startswith("the first") or self.backwards.endswith(NOT_LAST)

    @property
    def lacks_size(self) -> bool:
        return self.is_object or self.is_unsized

    @classmethod
    def from_event(cls, event: Collective, backwards: str = "") -> Calls:
        """Build the `Calls` for one collective, with a count of 0."""
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
        """Format the calls as in a snapshot: ``x2 of 64 B float32 parameters ahead 1``."""
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
"""The fields that snapshots write as words, keyed by name, in the order in which they appear."""
_DEFAULTS: Final = {entry.name: entry.default for entry in fields(Calls)}
UNTIMED: Final[dict[str, Any]] = {
    name: _DEFAULTS[name] for name, word in CALL_WORDS.items() if word.is_timing
}
"""Defaults of the timing fields; pass them to `replace_fields` to ignore when calls are issued."""
