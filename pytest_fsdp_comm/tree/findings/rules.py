"""Which findings a project wants, at which level and from which size on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.tree.model import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

RuleLevel = Literal["error", "warning", "off"]

CODES: Final[Mapping[str, RuleLevel]] = {
    "no-root-unit": "error",
    "grouped-root": "error",
    "nested-kinds": "error",
    "wrapped-after-parent": "error",
    "split-tie": "error",
    "unmanaged-parameter": "error",
    "ranks-differ": "error",
    "large-replicated": "warning",
    "partly-wrapped": "warning",
    "mixed-frozen": "warning",
    "frozen-gathered-in-backward": "warning",
    "unit-too-small": "warning",
    "unit-too-large": "warning",
    "padding": "warning",
    "dim-smaller-than-axis": "warning",
    "precision-override": "warning",
    "mixed-dtypes": "warning",
}
"""Every code with its level unless the project says otherwise. Errors are those that make training
wrong or defeat FSDP; warnings cost time or memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRules:
    """What counts as a finding."""

    levels: Mapping[str, RuleLevel] = field(default_factory=lambda: dict(CODES))
    """Level of each code."""
    small_nbytes: int = 1 << 20
    """A unit that gathers less, and less than a sixteenth of the largest unit, is too small.

    1 MiB by our choice, not by a measurement: small messages are bound by latency, so that calls
    cost and bytes do not. Measure with nccl-tests on your machines, and set it.
    """
    large_nbytes: int = 4 << 30
    """A unit that gathers more is too large: 4 GiB by our choice, since prefetching holds two
    units at once."""
    replicated_nbytes: int = 16 << 20
    """A parameter that every rank holds whole is large from here on."""
    padding_share: float = 0.1
    """Padding of more than this share of a unit's all-gather is a finding."""
    padding_nbytes: int = 64 << 10
    """Padding of fewer bytes is none, whatever its share: 64 KiB by our choice."""


def parse_rules(lines: Iterable[str]) -> FindingRules:
    """Reads the lines of the ini value ``fsdp_comm_findings``.

    Args:
        lines: ``<code> = error``, ``warning`` or ``off``; or a threshold of `FindingRules` such as
            ``small_nbytes = 4096``. ``all = off`` sets every code; later lines win.

    Raises:
        ValueError: A line is neither; the text says what is allowed.
    """
    rules = FindingRules()
    levels = dict(rules.levels)
    thresholds = {entry.name: entry for entry in fields(rules) if entry.name != "levels"}
    for line in filter(None, map(str.strip, lines)):
        name, equals, value = (part.strip() for part in line.partition("="))
        if equals and name in thresholds:
            rules = _with_threshold(rules, name, value)
        elif equals and (name in CODES or name == "all"):
            if value not in get_args(RuleLevel):
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected one of {', '.join(get_args(RuleLevel))},"
                    f" got {value!r}"
                )
            chosen = CODES if name == "all" else (name,)
            levels.update(dict.fromkeys(chosen, cast("RuleLevel", value)))
        else:
            raise ValueError(
                f"fsdp_comm_findings: cannot read {line!r}; expected '<code> = error|warning|off' "
                f"with a code of {', '.join(CODES)}, or all; or a threshold of "
                f"{', '.join(thresholds)}, such as small_nbytes = 4096"
            )
    return replace(rules, levels=levels)


def _with_threshold(rules: FindingRules, name: str, value: str) -> FindingRules:
    try:
        number = float(value) if name == "padding_share" else int(value)
    except ValueError:
        number = -1
    if number < 0:
        kind = "a share such as 0.1" if name == "padding_share" else "a whole number of bytes"
        raise ValueError(f"fsdp_comm_findings: {name}: expected {kind}, got {value!r}")
    if name == "padding_share":
        return replace(rules, padding_share=float(number))
    given: dict[str, Any] = {name: int(number)}
    return replace(rules, **given)


def propose(
    code: str, fqns: Iterable[str], reason: str, cure: str, nbytes: int | None = None
) -> Finding:
    """A finding, whose level the rules decide later."""
    ordered = tuple(sorted(fqns, key=natural_key))
    return Finding(
        code=code, level="warning", fqns=ordered, reason=reason, cure=cure, nbytes=nbytes
    )
