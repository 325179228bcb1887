"""Findings (mistakes in how a model is wrapped), and the settings that select them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.fqn import fold_fqns
from pytest_fsdp_comm.text.words import shorten_line, show_count, show_nbytes

Level = Literal["error", "warning"]
RuleLevel = Literal["error", "warning", "off"]

# Findings are wrapped at this width, so that they fit into 80 columns in the report of a test.
_WIDTH: Final = 66
# Reprs are shortened to this width, so that they fit into 80 columns after `E assert not`.
_MAX_REPR: Final = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A mistake, or a likely mistake, in how a model is wrapped."""

    code: str
    """A short name, such as ``no-root-unit``."""
    level: Level
    fqns: tuple[str, ...]
    """The affected modules or parameters, in natural order."""
    reason: str
    """The problem and its cost."""
    cure: str
    """The code change that fixes the problem."""
    nbytes: int | None = None
    """The cost on each rank, in bytes of memory or of traffic per step (`reason` says which); None
    if unknown."""
    count: int = 1
    """The number of cases that the finding combines, such as equal layers with different names.
    `reason` describes one case; `nbytes` is the sum of all cases."""

    @property
    def cost(self) -> str:
        """``2.9 KiB``, or ``4 cases, 2.9 KiB each, 11.6 KiB in all``; no bytes if unknown."""
        cases = [f"{self.count} cases"] if self.count > 1 else []
        if self.nbytes is None:
            return "".join(cases)
        total = show_nbytes(self.nbytes)
        sizes = [f"{show_nbytes(self.nbytes // self.count)} each", f"{total} in all"]
        return ", ".join([*cases, *(sizes if cases else [total])])

    @property
    def where(self) -> str:
        """The modules or parameters, with siblings folded: ``layers.{0..3}.norm``."""
        return ", ".join(fold_fqns(self.fqns))

    def __str__(self) -> str:
        cost = f" ({self.cost})" if self.cost else ""
        title = f"{self.level} {self.code}{cost}: {self.where}"
        details = (self.reason, f"fix: {self.cure}")
        lines = [_wrap_text(title, indent=""), *(_wrap_text(text, indent="  ") for text in details)]
        return printable("\n".join(lines), "\n")


class Findings(tuple[Finding, ...]):
    """Findings, errors first: a tuple that prints well in the report of a failed test."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return ``<1 finding: partly-wrapped in layers.{3..5}>``, or ``()`` without findings."""
        if not self:
            return "()"
        listed = "; ".join(f"{finding.code} in {finding.where}" for finding in self)
        text = f"{show_count(len(self), 'finding')}: {listed}"
        return f"<{shorten_line(text, _MAX_REPR - len('<>'))}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _wrap_text(text: str, *, indent: str) -> str:
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
    """The levels and thresholds of findings."""

    levels: Mapping[str, RuleLevel] = field(default_factory=dict)
    """Levels that override the default levels of rules, keyed by the rule's code."""
    small_nbytes: int = 1 << 20
    """The latency of a collective, given as the bytes that the link could transfer in that time.

    A unit is too small if it gathers less than this, and less than a sixteenth of the largest unit.
    A change that adds collectives pays off if each of them saves more than this. 1 MiB is our
    choice, not a measurement: 20 us at 50 GB/s. Measure it with nccl-tests on your machines.
    """
    large_nbytes: int = 4 << 30
    """A unit that gathers more than this is too large. We chose 4 GiB because prefetch gathers two
    units at once."""
    replicated_nbytes: int = 16 << 20
    """A parameter of at least this size should be sharded."""
    padding_nbytes: int = 64 << 10
    """Less padding than this is ignored, however large its share. 64 KiB is our choice."""


# The fields that an ini file can set by name; all of them are in bytes.
THRESHOLDS: Final = tuple(
    entry.name for entry in fields(FindingSettings) if entry.name.endswith("_nbytes")
)
