"""A tree as one HTML file without scripts: foldable, with a bar of bytes for each unit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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

    from jinja2 import Template

    from pytest_fsdp_comm.tree.model import ShardTree

_INDENT_REM: Final = 1.2
_FILTERS: Final = (
    mark,
    parameter_words,
    placement_words,
    policy_words,
    relation_words,
    show_nbytes,
    summary_words,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageRow:
    """A row, and how the page shows it."""

    row: TreeRow
    is_foldable: bool
    """Whether it is the head of a box with the rows below it."""
    is_open: bool
    """Whether that box is open at first."""
    closes: int
    """How many boxes end after it."""
    gathered: int
    """Bytes of one all-gather of all its units."""
    bar_width: str
    """`gathered` as a percentage of the largest unit's."""
    kept_width: str
    """What a rank keeps of them anyway, as a percentage."""

    @property
    def indent(self) -> str:
        """Of its name, in rem."""
        return f"{min(self.row.depth, MAX_DEPTH) * _INDENT_REM:.1f}"

    @property
    def parameter_indent(self) -> str:
        """Of its parameters' rows, in rem."""
        return f"{(min(self.row.depth, MAX_DEPTH) + 1) * _INDENT_REM:.1f}"


def render_tree_html(tree: ShardTree) -> str:
    """Draws a tree as an HTML page.

    Rows can be folded; a unit's bar shows what it gathers, relative to the largest unit, and the
    part of it that a rank keeps anyway. Rows inside a unit are folded at first.
    """
    return _template().render(tree=tree, rows=_page_rows(tree))


@functools.cache
def _template() -> Template:
    from jinja2 import (  # noqa: PLC0415  # only for those who want a page
        Environment,
        PackageLoader,
        StrictUndefined,
    )

    environment = Environment(
        loader=PackageLoader("pytest_fsdp_comm.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({words.__name__: words for words in _FILTERS})
    return environment.get_template("tree.html.jinja")


def _page_rows(tree: ShardTree) -> Iterator[_PageRow]:
    largest = max((unit.nbytes_gathered for unit in tree.units), default=0)
    rows = list(tree_rows(tree))
    next_depths = [*(row.depth for row in rows[1:]), 0]
    open_depths: list[int] = []
    for row, next_depth in zip(rows, next_depths, strict=True):
        # Browsers draw no thousands of nested boxes: below MAX_DEPTH the rows lie side by side.
        is_foldable = row.depth < MAX_DEPTH and (next_depth > row.depth or row.has_parameter_rows)
        if is_foldable:
            open_depths.append(row.depth)
        closes = 0
        while open_depths and open_depths[-1] >= next_depth:
            open_depths.pop()
            closes += 1
        gathered = sum(unit.nbytes_gathered for unit in row.units)
        kept = sum(unit.nbytes_kept for unit in row.units)
        yield _PageRow(
            row=row,
            is_foldable=is_foldable,
            is_open=not (row.depth and row.units),
            closes=closes,
            gathered=gathered,
            bar_width=f"{100 * gathered / (largest or 1):.2f}",
            kept_width=f"{100 * min(1.0, kept / (gathered or 1)):.2f}",
        )
