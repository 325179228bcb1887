"""All rules, and what they find in a tree under the settings of a project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.tree.findings import mistakes, waste
from pytest_fsdp_comm.tree.findings.rule import Rule
from pytest_fsdp_comm.tree.findings.wrapping import Wrapping

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.tree.finding import Finding
    from pytest_fsdp_comm.tree.findings.settings import FindingSettings
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
    wrapping = Wrapping(tree, settings.thresholds)
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


def compares_ranks(settings: FindingSettings) -> bool:
    """Whether the project wants the trees of the ranks compared."""
    return settings.levels.get(mistakes.ranks_differ.code) != "off"


def _apply(rule: Rule, subject: object, settings: FindingSettings) -> tuple[Finding, ...]:
    level = settings.levels.get(rule.code, rule.level)
    return () if level == "off" else tuple(rule.findings(subject, level))
