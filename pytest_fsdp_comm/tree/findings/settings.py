"""Which findings a project wants, at which level and from which size on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable

RuleLevel = Literal["error", "warning", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From which size on something is a finding."""

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
    padding_share: float = 0.1
    """Padding of more than this share of a unit's all-gather is a finding."""
    padding_nbytes: int = 64 << 10
    """Padding of fewer bytes is none, whatever its share: 64 KiB by our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSettings:
    """What counts as a finding."""

    levels: Mapping[str, RuleLevel] = field(default_factory=dict)
    """Code -> level, where that is not the rule's own."""
    thresholds: Thresholds = field(default_factory=Thresholds)


def parse_settings(lines: Iterable[str]) -> FindingSettings:
    """Read the lines of ini ``fsdp_comm_findings``; ValueError says what is allowed."""
    # A line sets the level of a code, or of `all`, or a threshold; later lines win.
    given = [line for line in map(str.strip, lines) if line]
    if not given:
        return FindingSettings()
    from pytest_fsdp_comm.tree.findings.rules import RULES  # noqa: PLC0415  # few sessions need them

    codes = [rule.code for rule in RULES]
    levels: dict[str, RuleLevel] = {}
    thresholds: dict[str, Any] = {entry.name: entry.default for entry in fields(Thresholds)}
    for line in given:
        name, equals, value = (word.strip() for word in line.partition("="))
        if equals and name in thresholds:
            thresholds[name] = _threshold(name, value)
        elif equals and name in (*codes, "all"):
            if value not in get_args(RuleLevel):
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected one of {', '.join(get_args(RuleLevel))},"
                    f" got {value!r}"
                )
            chosen = codes if name == "all" else [name]
            levels.update(dict.fromkeys(chosen, cast("RuleLevel", value)))
        else:
            raise ValueError(
                f"fsdp_comm_findings: cannot read {line!r}; expected '<code> = error|warning|off' "
                f"with a code of {', '.join(codes)}, or all; or a threshold of "
                f"{', '.join(thresholds)}, such as small_nbytes = 4096"
            )
    return FindingSettings(levels=levels, thresholds=Thresholds(**thresholds))


def _threshold(name: str, value: str) -> int | float:
    is_share = name == "padding_share"
    try:
        number = float(value) if is_share else int(value)
    except ValueError:
        number = -1
    if number < 0:
        kind = "a share such as 0.1" if is_share else "a whole number of bytes"
        raise ValueError(f"fsdp_comm_findings: {name}: expected {kind}, got {value!r}")
    return number
