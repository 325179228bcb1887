"""All rules: first what makes training wrong, then what costs more than it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.tree.findings import mistakes, waste
from pytest_fsdp_comm.tree.findings.rule import Rule

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.model import ShardTree

RULES: Final[tuple[Rule[Any], ...]] = tuple(
    declared
    for module in (mistakes, waste)
    for declared in vars(module).values()
    if isinstance(declared, Rule)
)
"""Every rule, in the order of declaration."""

TREE_RULES: Final[tuple[Rule[ShardTree], ...]] = tuple(
    declared for declared in RULES if declared is not mistakes.ranks_differ
)
"""Those that look at the tree of one rank."""
