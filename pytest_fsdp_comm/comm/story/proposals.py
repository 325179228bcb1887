"""All steps that may lie between two states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.story.activations import propose_of_phases
from pytest_fsdp_comm.comm.story.anywhere import propose_anywhere
from pytest_fsdp_comm.comm.story.steps import Replaced, Step
from pytest_fsdp_comm.comm.story.units import propose_of_units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.comm.story.between import Between, Rows


def propose(between: Between, least: int) -> Iterator[Step]:
    """All steps that may lie between two states.

    Args:
        between: The states.
        least: The lowest `Step.order` of interest.
    """
    yield from propose_anywhere(between, least)
    for step in (*propose_of_phases(between), *propose_of_units(between)):
        yield replace(step, was=_rows_before(between, step)) if isinstance(step, Replaced) else step


def _rows_before(between: Between, step: Replaced) -> Rows:
    return {
        owner: {key: content.row(key) for key in rows}
        for owner, rows in step.rows.items()
        for content in [between.state.get(owner)]
        if content is not None
    }
