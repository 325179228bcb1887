"""Changes of a framework's step: one that sends the same is not told, any other in a true line.

A test records the reviewed step and changed ones, each with `observed`, and asserts::

    assert not told_of(reviewed, innocent)
    assert told_of(reviewed, planted)[0] == "..."
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
    """Records a step and its tree, on all ranks; both witnesses have seen as much.

    Args:
        comm_mode: The fixture; holds the recording afterwards.
        model: Whose modules own what is sent; its tree is read after the step.
        step: As in `oracle.witnessed`, which runs it once more after the recording.
        warm_up: Steps before.
        profiler: As in `oracle.witnessed`: False where two runs do not send the same.
        is_traced: False to record with the bare mode, where the model is not known before.
    """
    witnessed(comm_mode, model if is_traced else None, step, warm_up=warm_up, profiler=profiler)
    return side_of(comm_mode, model)


def told_of(old: Side, new: Side) -> list[str]:
    """What a comparison of the written snapshots tells, its first line first; empty if nothing."""
    both_sides(old, new)
    trees = old.tree.common, new.tree.common
    # None where ranks differ, as in a pipeline.
    evidence = tree_evidence(*trees) if all(trees) else None
    comparison = compare(old.comm, new.comm, evidence=evidence)
    return told(comparison) if comparison.changes else []


def tree_told_of(old: Side, new: Side) -> list[str]:
    """As `told_of`, of how the model is sharded."""
    changes = tree_diff.compare(old.tree, new.tree)
    if not changes:
        return []
    return [line.strip() for line in render_tree_changes(changes, snapshot="s").body]
