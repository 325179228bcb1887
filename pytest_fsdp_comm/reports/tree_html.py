"""A tree as one HTML file without scripts: foldable, with a bar of bytes for each unit."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.reports.tree_rows import (
    MAX_DEPTH,
    TreeRow,
    parameter_words,
    placement_words,
    policy_words,
    tree_rows,
)
from pytest_fsdp_comm.text.fqn import fold_fqns
from pytest_fsdp_comm.text.nbytes import show_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_fsdp_comm.tree.model import ShardTree, ShardUnit

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --unit: #1a7f4b; --kept: #1a7f4b;
  --more: #1a7f4b55; --loose: #b45309; --error: #c62828; --dim: #888; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; max-width: 90rem; }
h1 { font-size: 1.2rem; margin: 0 0 .2rem; }
.summary, .legend { color: var(--dim); margin: 0 0 1rem; }
.finding { border-left: 4px solid var(--loose); padding: .2rem .8rem; margin: .5rem 0; }
.finding.error { border-color: var(--error); }
.finding b { margin-right: .5rem; }
.finding p { margin: 0; }
.row { display: grid; grid-template-columns: minmax(20rem, 4fr) minmax(20rem, 6fr) 6rem 11rem;
  gap: 1rem; align-items: center; border-bottom: 1px solid var(--line); padding: .1rem 0; }
.row.unit .name { font-weight: 600; }
.class, .placement { color: var(--dim); }
.name, .parameter { font-family: ui-monospace, monospace; font-size: 13px; }
.mark { color: var(--unit); font-weight: 600; }
.loose { color: var(--loose); }
.bytes { text-align: right; font-variant-numeric: tabular-nums; }
.bar { height: .7rem; background: var(--more); border-radius: 2px; min-width: 1px; }
.bar i { display: block; height: 100%; background: var(--kept); border-radius: 2px; }
.twin { display: inline-block; width: .8rem; height: .6rem; background: var(--kept); }
.twin.more { background: var(--more); }
details > summary { list-style: none; cursor: pointer; }
details > summary .name::before { content: "\\25b8  "; color: var(--dim); }
details[open] > summary > .row .name::before { content: "\\25be  "; }
.leaf .name::before { content: "\\00a0\\00a0 "; }
"""

_LEGEND: Final = (
    '<p class="legend"><span class="twin"></span> kept on each rank &nbsp; '
    '<span class="twin more"></span> gathered by one all-gather</p>'
)


def render_tree_html(tree: ShardTree) -> str:
    """Draws a tree as an HTML page.

    Rows can be folded; a unit's bar shows what it gathers, relative to the largest unit, and the
    part of it that a rank keeps anyway. Rows inside a unit are folded at first.
    """
    largest = max((unit.nbytes_gathered for unit in tree.units), default=0)
    rows = list(tree_rows(tree))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Sharded tree</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(tree.modules[0].class_name)}</h1>",
        f'<p class="summary">{escape(_summary(tree))}</p>',
        *_findings(tree),
        _LEGEND,
        *_nested(rows, largest),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _summary(tree: ShardTree) -> str:
    nbytes = sum(parameter.nbytes for parameter in tree.parameters)
    kept = sum(parameter.local_numel * parameter.itemsize for parameter in tree.parameters)
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in tree.mesh_axes) or "no mesh"
    return (
        f"{tree.world_size} ranks, {axes}; {len(tree.units)} units; {len(tree.parameters)} "
        f"parameters of {show_nbytes(nbytes)}, {show_nbytes(kept)} on rank {tree.rank}"
    )


def _findings(tree: ShardTree) -> Iterator[str]:
    for finding in tree.findings:
        cost = "" if finding.nbytes is None else f" ({show_nbytes(finding.nbytes)})"
        where = ", ".join(fold_fqns(finding.fqns))
        yield (
            f'<div class="finding {finding.level}"><p><b>{escape(finding.code)}{cost}</b> '
            f'<span class="name">{escape(where)}</span></p><p>{escape(finding.reason)}</p>'
            f'<p class="class">Cure: {escape(finding.cure)}</p></div>'
        )


def _nested(rows: list[TreeRow], largest: int) -> Iterator[str]:
    open_depths: list[int] = []
    for place, row in enumerate(rows):
        while open_depths and open_depths[-1] >= row.depth:
            open_depths.pop()
            yield "</details>"
        follows = rows[place + 1].depth if place + 1 < len(rows) else 0
        # Browsers draw no thousands of nested boxes: below MAX_DEPTH the rows lie side by side.
        is_foldable = row.depth < MAX_DEPTH and (follows > row.depth or _has_own_rows(row))
        if is_foldable:
            is_inside_block = row.depth > 0 and bool(row.units)
            yield "<details>" if is_inside_block else "<details open>"
            yield f"<summary>{_module(row, largest, leaf='')}</summary>"
            open_depths.append(row.depth)
        else:
            yield _module(row, largest, leaf=" leaf")
        yield from _parameters(row)
    yield from ("</details>" for _ in open_depths)


def _has_own_rows(row: TreeRow) -> bool:
    return len(row.parameters) > 1 or (bool(row.units) and bool(row.parameters))


def _module(row: TreeRow, largest: int, *, leaf: str) -> str:
    name = row.name if row.depth else "(root)"
    count = f" &times;{row.count}" if row.count > 1 else ""
    same = f" is {row.same_as}" if row.same_as else ""
    same += f" inside as {row.inside_as}" if row.inside_as else ""
    label = (
        f'<span style="padding-left:{min(row.depth, MAX_DEPTH) * 1.2:.1f}rem"><span class="name">'
        f'{escape(name)}{count}</span> <span class="class">{escape(row.class_name + same)}'
        "</span></span>"
    )
    if not row.units and not _has_own_rows(row):
        policy = "".join(_parameter(row, index) for index in range(len(row.parameters)))
    else:
        policy = "<br>".join(_policy(unit) for unit in row.units)
    gathered = sum(unit.nbytes_gathered for unit in row.units)
    kind = " unit" if row.units else ""
    return (
        f'<div class="row{kind}{leaf}">{label}<span>{policy}</span>'
        f'<span class="bytes">{show_nbytes(gathered) if gathered else ""}</span>'
        f"<span>{_bar(row.units, gathered, largest)}</span></div>"
    )


def _policy(unit: ShardUnit) -> str:
    mark = "FULLY SHARDED" if unit.is_fully_sharded else "REPLICATED"
    return f'<span class="mark">{mark}</span> {escape(policy_words(unit))}'


def _bar(units: Iterable[ShardUnit], gathered: int, largest: int) -> str:
    if not gathered:
        return ""
    kept = min(1.0, sum(unit.nbytes_kept for unit in units) / gathered)
    return (
        f'<div class="bar" style="width:{100 * gathered / largest:.2f}%">'
        f'<i style="width:{100 * kept:.2f}%"></i></div>'
    )


def _parameters(row: TreeRow) -> Iterator[str]:
    if _has_own_rows(row):
        indent = (min(row.depth, MAX_DEPTH) + 1) * 1.2
        for index in range(len(row.parameters)):
            yield (
                f'<div class="row"><span style="padding-left:{indent:.1f}rem"></span>'
                f"<span>{_parameter(row, index)}</span></div>"
            )


def _parameter(row: TreeRow, index: int) -> str:
    parameter = row.parameters[index]
    loose = "" if parameter.is_sharded else " loose"
    return (
        f'<span class="parameter">{escape(parameter_words(parameter))}</span> '
        f'<span class="placement{loose}">{escape(placement_words(parameter))}</span>'
    )
