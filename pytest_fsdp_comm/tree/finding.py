"""Findings about the wrapping of a model, as values and as text, and which a project wants."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from pytest_fsdp_comm.text.fqn import fold_fqns
from pytest_fsdp_comm.text.words import counted, shorten, show_nbytes

Level = Literal["error", "warning"]
RuleLevel = Literal["error", "warning", "off"]

# What 80 columns leave of a line in the report of a failed test method.
_WIDTH: Final = 66
# What 80 columns leave of a line that begins with `E assert not`.
_MAX_REPR: Final = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A wrapping mistake, or what is likely one."""

    code: str
    """A short name, such as ``no-root-unit``."""
    level: Level
    fqns: tuple[str, ...]
    """Of the modules or parameters concerned, in natural order."""
    reason: str
    """What is the case, and why it hurts."""
    cure: str
    """What to write instead."""
    nbytes: int | None = None
    """What it costs: bytes on each rank, of memory or of traffic in a step as the reason says; None
    where that is unknown."""
    count: int = 1
    """How many cases that differ in nothing but names it stands for, such as equal layers: `reason`
    speaks of each, `nbytes` is the sum."""

    @property
    def cost(self) -> str:
        """``2.9 KiB``, or ``4 alike, 2.9 KiB each, 11.6 KiB in all``; empty if one and unknown."""
        alike = [f"{self.count} alike"] if self.count > 1 else []
        if self.nbytes is None:
            return "".join(alike)
        total = show_nbytes(self.nbytes)
        each = [f"{show_nbytes(self.nbytes // self.count)} each", f"{total} in all"]
        return ", ".join([*alike, *(each if alike else [total])])

    @property
    def where(self) -> str:
        """The modules or parameters, siblings folded: ``layers.{0..3}.norm``."""
        return ", ".join(fold_fqns(self.fqns))

    def __str__(self) -> str:
        cost = f" ({self.cost})" if self.cost else ""
        title = f"{self.level} {self.code}{cost}: {self.where}"
        below = (self.reason, f"cure: {self.cure}")
        return "\n".join([_wrap(title, indent=""), *(_wrap(text, indent="  ") for text in below)])


class Findings(tuple[Finding, ...]):
    """Wrapping mistakes, errors first: a tuple whose texts are for the report of a failed test."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Codes and modules: ``<1 finding: partly-wrapped in layers.{3..5}>``; ``()`` if empty."""
        if not self:
            return "()"
        shown = "; ".join(f"{finding.code} in {finding.where}" for finding in self)
        text = f"{counted(len(self), 'finding')}: {shown}"
        return f"<{shorten(text, _MAX_REPR - len('<>'))}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _wrap(text: str, *, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent or "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSettings:
    """What counts as a finding: levels, and from which size on."""

    levels: Mapping[str, RuleLevel] = field(default_factory=dict)
    """Code -> level, where that is not the rule's own."""
    small_nbytes: int = 1 << 20
    """What a collective costs, in bytes: its latency times the bandwidth of the link.

    A unit that gathers less, and less than a sixteenth of the largest unit, is too small; a change
    that adds collectives pays if it saves more bytes than this for each. 1 MiB by our choice, not
    by a measurement: 20 us at 50 GB/s. Measure with nccl-tests on your machines, and set it.
    """
    large_nbytes: int = 4 << 30
    """A larger unit is too large: 4 GiB by our choice, as prefetching holds two units at once."""
    replicated_nbytes: int = 16 << 20
    """A parameter that every rank holds whole is large from here on."""
    padding_nbytes: int = 64 << 10
    """Padding of fewer bytes is none, whatever its share: 64 KiB by our choice."""


# The fields that the ini file sets by name, each a number of bytes.
THRESHOLDS: Final = tuple(
    entry.name for entry in fields(FindingSettings) if entry.name.endswith("_nbytes")
)
