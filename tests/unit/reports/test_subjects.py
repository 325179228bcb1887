"""Tree changes of many parameters name the modules that contain them."""

import pytest

from pytest_fsdp_comm.reports.changes import render_tree_changes
from pytest_fsdp_comm.tree.diff import TreeChange


def changes(*subjects, noun="parameters", what="trainable -> frozen"):
    return [TreeChange(subject=subject, what=what, noun=noun) for subject in subjects]


@pytest.mark.parametrize(
    ("subjects", "noun", "line"),
    [
        (("a.weight",), "parameters", "a.weight"),
        (("a.w", "b.w", "c.w"), "parameters", "a.w, b.w, c.w"),
        (
            ("layers.{0..3}.q.w", "layers.{0..3}.q.b", "layers.{0..3}.k.w", "layers.{0..3}.k.b"),
            "parameters",
            "16 parameters in layers.{0..3}.k, layers.{0..3}.q",
        ),
        (
            ("text.a.w", "text.b.w", "text.c.d.w", "text.e.w", "head.w"),
            "parameters",
            "5 parameters in head, text",
        ),
        (
            ("l.0.q.a+l.0.q.b", "l.0.v.a+l.0.v.b", "l.1.q.a+l.1.q.b", "l.1.v.a+l.1.v.b"),
            "units",
            "4 units in l.{0..1}.q, l.{0..1}.v",
        ),
    ],
)
def test_many_subjects_are_named_by_module(subjects, noun, line):
    (statement,) = render_tree_changes(changes(*subjects, noun=noun)).changes
    assert statement.text == f"{line}: trainable -> frozen"


def test_other_changes_are_other_statements():
    listed = [*changes("a.w", "b.w"), *changes("c.w", what="removed"), *changes("d", noun="units")]
    texts = [statement.text for statement in render_tree_changes(listed).changes]
    assert texts == ["a.w, b.w: trainable -> frozen", "c.w: removed", "d: trainable -> frozen"]


def test_parameters_all_over_the_model_are_not_of_its_root():
    names = [f"{part}.{index}.weight" for part in ("a", "b", "c", "d") for index in (0, 1)]
    (statement,) = render_tree_changes(changes(*names)).changes
    assert statement.text == "8 parameters of the model: trainable -> frozen"


@pytest.mark.parametrize("placed", ["Shard(0) over dp", "Replicate() over tp"])
def test_replaced_parameters_share_a_line(placed):
    removed = changes("q.weight", "k.weight", what="removed, was Shard(0) over dp")
    added = changes("qk.weight", what=f"added, {placed}")
    texts = [statement.text for statement in render_tree_changes([*removed, *added]).changes]
    if placed.startswith("Shard"):
        assert texts == ["q.weight, k.weight: removed; qk.weight: added, Shard(0) over dp"]
    else:
        assert len(texts) == 2
