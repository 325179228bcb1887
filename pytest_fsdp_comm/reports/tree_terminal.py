"""A tree for the terminal: aligned columns, and colour where the caller has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.reports.tree_rows import (
    MAX_DEPTH,
    TreeRow,
    mark,
    parameter_words,
    placement_words,
    policy_words,
    relation_words,
    summary_words,
    tree_rows,
)
from pytest_fsdp_comm.text.nbytes import show_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree

# Module or parameter, policy or placement, gathered, kept, and a style.
_Line = tuple[str, str, str, str, str]

_HEADINGS: Final[_Line] = ("module", "policy or placement", "gathered", "kept", "dim")
_STYLES: Final = {
    "": "",
    "dim": "2",
    "unit": "1;32",
    "loose": "33",
    "error": "1;31",
    "warning": "33",
}
"""SGR codes: a unit bold green, what no unit shards yellow."""


def render_tree(tree: ShardTree, *, color: bool = False) -> str:
    """Draw modules and parameters in columns: policy or placement, bytes of each unit."""

    def painted(text: str, style: str) -> str:
        code = _STYLES[style]
        return f"\x1b[{code}m{text}\x1b[0m" if color and code and text else text

    lines = [_HEADINGS, *(line for row in tree_rows(tree) for line in _row_lines(row))]
    first, second, third, fourth = (max(len(line[at]) for line in lines) for at in range(4))
    drawn = []
    for module, policy, gathered, kept, style in lines:
        row = f"{module:{first}}  {policy:{second}}  {gathered:>{third}}  {kept:>{fourth}}"
        drawn.append(painted(row.rstrip(), style))
    for finding in tree.findings:
        head, *below = str(finding).splitlines()
        drawn += ["", painted(head, finding.level), *below]
    return "\n".join([summary_words(tree), "", *drawn])


def _row_lines(row: TreeRow) -> Iterator[_Line]:
    indent = "  " * min(row.depth, MAX_DEPTH)
    count = f" x{row.count}" if row.count > 1 else ""
    label = f"{indent}{row.name}{count} [{row.class_name}]{relation_words(row)}"
    for unit in row.units:
        gathered = show_nbytes(unit.nbytes_gathered) if unit.nbytes_gathered else ""
        policy = f"{mark(unit)} {policy_words(unit)}"
        yield (label, policy, gathered, show_nbytes(unit.nbytes_kept), "unit")
        label = indent
    if not row.has_parameter_rows and row.parameters:
        yield _parameter_line(f"{label} ", row.parameters[0])
        return
    if not row.units:
        yield (label, "", "", "", "")
    for parameter in row.parameters:
        yield _parameter_line(f"{indent}  . ", parameter)


def _parameter_line(label: str, parameter: ParameterNode) -> _Line:
    style = "" if parameter.is_sharded else "loose"
    return (label + parameter_words(parameter), placement_words(parameter), "", "", style)
