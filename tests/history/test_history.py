"""Regressions of real projects: each is red, and its first line names what an expert would.

What each sends more is derived by hand, and seen by torch's profiler too. An innocent change of the
same code is green.
"""

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from history.cases import HISTORY
from oracle import profiled
from regressions.table import both_sides, record, told

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.changes import render_tree_changes
from pytest_fsdp_comm.snapshots.differences import tree_evidence
from pytest_fsdp_comm.tree import diff as tree_diff

DOCS = Path(__file__).parents[2] / "docs"

# Of torch, about what the cases do.
pytestmark = pytest.mark.filterwarnings("ignore")


def observe(case, comm_mode, *, changed):
    """A side, and its collectives by kind, of which the profiler has seen as many."""
    steps = []

    def build(changed):
        model, run = case.build(changed)
        steps.append(run)
        return model, run

    side = record(replace(case, build=build), comm_mode, changed=changed)
    kinds = Counter(event.kind for event in comm_mode.events)
    assert kinds == Counter(profiled(steps[0]))
    return side, kinds


def check(comm_mode, name):
    case = HISTORY[name]
    (old, before), (new, after) = (
        observe(case, comm_mode, changed=changed) for changed in (False, True)
    )
    both_sides(old, new)
    assert {kind: after[kind] - before[kind] for kind in before | after} == {
        **dict.fromkeys(before | after, 0),
        **case.more,
    }
    evidence = tree_evidence(old.tree.common, new.tree.common)
    comparison = compare(old.comm, new.comm, evidence=evidence)
    assert bool(comparison.changes) != case.is_silent
    likely = [line for line in told(comparison) if line.startswith("likely: ")]
    assert likely == [f"likely: {case.likely}"] * bool(case.likely)
    if not case.is_silent:
        # Without what DDP carries, whose role is not the point.
        assert told(comparison)[0].partition(", added ")[0] == case.first
    tree = render_tree_changes(tree_diff.compare(old.tree, new.tree), snapshot="s").lines
    assert not case.tree or tree[1].strip() == case.tree
    assert case.first or case.tree
    if case.neighbour is not None:
        innocent = record(replace(case, build=lambda _: case.neighbour()), comm_mode, changed=False)
        assert compare(old.comm, innocent.comm).changes == ()


def select(gloo):
    return pytest.mark.parametrize("name", [n for n, case in HISTORY.items() if case.gloo == gloo])


@pytest.mark.distributed(world_size=4, backend="fake", scope="module")
@select(gloo=0)
def test_regression_fails_and_look_alike_passes(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=2, scope="module")
@select(gloo=2)
def test_ddp_regression_fails_and_look_alike_passes(comm_mode, name):
    check(comm_mode, name)


def test_history_page_matches_cases():
    table = runpy.run_path(str(DOCS / "history_table.py"))["table"]()
    assert table in (DOCS / "history.md").read_text(), "run: python docs/history_table.py"


def test_each_case_has_its_thread():
    threads = [thread for case in HISTORY.values() for thread in case.threads]
    assert len(threads) == len({*threads})
    assert len(HISTORY) >= 15
    assert len({thread.split("/")[1] for thread in threads}) >= 15
