"""Finds the wrapping mistakes that torch does not check: one function for each sort.

A rule looks at a tree and yields `Finding` values; which of them count, and at which level, is the
project's choice (`pytest_fsdp_comm.tree.findings.rules`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.tree.findings import costs, wrapping
from pytest_fsdp_comm.tree.findings.rules import FindingRules
from pytest_fsdp_comm.tree.model import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.tree.model import ShardTree


def with_findings(tree: ShardTree, rules: FindingRules | None = None) -> ShardTree:
    """The same tree with its wrapping mistakes, errors first."""
    rules = rules or FindingRules()
    findings = [
        replace(finding, level="error" if rules.levels[finding.code] == "error" else "warning")
        for rule in _RULES
        for finding in rule(tree, rules)
        if rules.levels[finding.code] != "off"
    ]
    findings.sort(key=lambda finding: finding.level != "error")
    return replace(tree, findings=tuple(findings))


def rank_findings(texts: Mapping[int, str]) -> tuple[Finding, ...]:
    """Compares the trees of all ranks.

    Args:
        texts: What `pytest_fsdp_comm.snapshots.tree_text.format_tree` writes, by rank, ascending.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return ()
    (first, first_ranks), (second, second_ranks), *_ = ranks_of.items()
    lines = set(first.splitlines()) ^ set(second.splitlines())
    shown = min(lines, key=lambda line: (line.startswith("total"), line))
    return (
        Finding(
            code="ranks-differ",
            level="error",
            fqns=("",),
            reason=(
                f"ranks {_join(first_ranks)} and ranks {_join(second_ranks)} shard the model "
                f"differently, first in: {shown}; their collectives will not match"
            ),
            cure="build and wrap the model alike on all ranks",
        ),
    )


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


_RULES: Final[tuple[Callable[[ShardTree, FindingRules], Iterator[Finding]], ...]] = (
    wrapping.find_no_root_unit,
    wrapping.find_grouped_root,
    wrapping.find_nested_kinds,
    wrapping.find_wrapped_after_parent,
    wrapping.find_split_tie,
    wrapping.find_unmanaged,
    wrapping.find_partly_wrapped,
    costs.find_large_replicated,
    costs.find_mixed_frozen,
    costs.find_frozen_gathered,
    costs.find_unit_sizes,
    costs.find_padding,
    costs.find_short_dimensions,
    costs.find_precision_overrides,
    costs.find_mixed_dtypes,
)
