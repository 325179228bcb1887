"""All rules, and what they find in a tree under the settings of a project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, cast, get_args

from pytest_fsdp_comm.tree.finding import THRESHOLDS, Finding, FindingSettings, RuleLevel
from pytest_fsdp_comm.tree.findings import mistakes, waste
from pytest_fsdp_comm.tree.findings.wrapping import Rule, Wrapping
from pytest_fsdp_comm.tree.model import ShardTree

# First what makes training wrong, then what costs more than it needs; in order of declaration.
RULES: Final = tuple(
    declared
    for module in (mistakes, waste)
    for declared in vars(module).values()
    if isinstance(declared, Rule)
)


def find(tree: ShardTree, settings: FindingSettings) -> tuple[Finding, ...]:
    """Find the wrapping mistakes of one rank's tree, errors first."""
    wrapping = Wrapping(tree, settings)
    found = [
        finding
        for rule in RULES
        if rule is not mistakes.ranks_differ
        for finding in _apply(rule, wrapping, settings)
    ]
    return tuple(sorted(found, key=lambda finding: finding.level != "error"))


def find_between_ranks(texts: Mapping[int, str], settings: FindingSettings) -> tuple[Finding, ...]:
    """Compare trees of ranks that should be alike, as `tree_text.format_profile` writes them."""
    return _apply(mistakes.ranks_differ, texts, settings)


def _apply(rule: Rule, subject: object, settings: FindingSettings) -> tuple[Finding, ...]:
    level = settings.levels.get(rule.code, rule.level)
    return () if level == "off" else tuple(rule.findings(subject, level))


def parse_settings(lines: Iterable[str]) -> FindingSettings:
    """Read the lines of ini ``fsdp_comm_findings``; ValueError says what is allowed."""
    # A line sets the level of a code, or of `all`, or a threshold; later lines win.
    codes = [rule.code for rule in RULES]
    levels: dict[str, RuleLevel] = {}
    thresholds: dict[str, int] = {}
    for line in filter(None, map(str.strip, lines)):
        name, equals, value = (word.strip() for word in line.partition("="))
        if equals and name in THRESHOLDS:
            if not value.isdecimal():
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected a whole number of bytes, got {value!r}"
                )
            thresholds[name] = int(value)
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
                f"{', '.join(THRESHOLDS)}, such as small_nbytes = 4096"
            )
    return FindingSettings(levels=levels, **thresholds)
