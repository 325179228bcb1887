"""The failure text of a tree that changed."""

from pytest_fsdp_comm.reports.tree_changes import render_tree_changes
from pytest_fsdp_comm.tree.diff import TreeChange

WHERE = {"snapshot": "snapshots/test_it/test_tree.comm", "accept": "pytest --snapshot-update"}


def test_few_changes_are_shown_in_full():
    changes = [
        TreeChange(subject="layers.{0..3}", what="becomes a root", likely="no root"),
        TreeChange(subject="layers.{0..3}", what="reshard_after_forward True -> False"),
    ]
    explanation = render_tree_changes(changes, **WHERE)
    assert explanation.short == (
        "fsdp_tree differs from snapshots/test_it/test_tree.comm",
        "  layers.{0..3}: becomes a root, reshard_after_forward True -> False",
        "  likely: no root",
        "  accept: pytest --snapshot-update",
    )
    assert explanation.full == explanation.short


def test_many_changes_are_cut_before_pytest_cuts_them():
    changes = [TreeChange(subject=f"a{index}", what="gone", likely="x") for index in range(9)]
    explanation = render_tree_changes(changes, **WHERE)
    assert len(explanation.short) <= 8
    assert explanation.short[5:] == (
        "  ... and 5 more changes, below",
        "  likely: x",
        "  accept: pytest --snapshot-update",
    )
    assert len(explanation.full) == 9 + 3


def test_a_long_line_is_never_left_out_altogether():
    changes = [TreeChange(subject=name * 1000, what="gone") for name in "ab"]
    explanation = render_tree_changes(changes, **WHERE)
    assert [line for line in explanation.short if "gone" in line]
    assert "  ... and 1 more change, below" in explanation.short
