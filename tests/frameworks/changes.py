"""Compare recordings of a framework's step before and after a change.

A test records the reviewed step and changed ones, each with `observed`, and asserts::

    assert not comm_failure(reviewed, innocent)
    assert comm_failure(reviewed, planted)[0] == "..."
"""

from typing import TYPE_CHECKING

from oracle import witnessed
from regressions.table import Side, both_sides, side_of, told

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.changes import render_tree_changes
from pytest_fsdp_comm.snapshots.differences import tree_evidence
from pytest_fsdp_comm.tree import diff as tree_diff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from pytest_fsdp_comm.recording.comm_mode import CommMode


def observed(
    comm_mode: "CommMode",
    model: "nn.Module | Sequence[nn.Module]",
    step: "Callable[[], object]",
    *,
    warm_up: int = 1,
    profiler: bool = True,
    is_traced: bool = True,
) -> Side:
    """Record a step and its tree on all ranks, and check the recording with both witnesses.

    Args:
        comm_mode: The fixture, which has the recording afterwards.
        model: The model that is recorded; its tree is read after the step.
        step: As in `oracle.witnessed`, which runs it again after the recording.
        warm_up: How many steps run before the recording.
        profiler: As in `oracle.witnessed`; False if two runs communicate differently.
        is_traced: False to record without a model, if the step creates or wraps it.
    """
    witnessed(comm_mode, model if is_traced else None, step, warm_up=warm_up, profiler=profiler)
    return side_of(comm_mode, model)


def comm_failure(old: Side, new: Side) -> list[str]:
    """Return the lines of the failure of a communication snapshot; empty if it passes."""
    both_sides(old, new)
    trees = old.tree.common, new.tree.common
    # The common tree is None if ranks differ, as in a pipeline.
    evidence = tree_evidence(*trees) if all(trees) else None
    comparison = compare(old.comm, new.comm, evidence=evidence)
    return told(comparison) if comparison.changes else []


def tree_failure(old: Side, new: Side) -> list[str]:
    """Return the lines of the failure of a tree snapshot; empty if it passes."""
    changes = tree_diff.compare(old.tree, new.tree)
    if not changes:
        return []
    return [line.strip() for line in render_tree_changes(changes, snapshot="s").body]
