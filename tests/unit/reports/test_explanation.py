"""The text of failed comparisons: at most 8 lines, or everything."""

import re
from dataclasses import replace

import pytest
from sample_profiles import in_bfloat16, profile, reduced_often

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.changes import (
    headline_of_steps,
    render_comparison,
    render_tree_changes,
)
from pytest_fsdp_comm.reports.explanation import FailureText, failure_lines, summary_lines
from pytest_fsdp_comm.tree.diff import TreeChange

ACCEPT = "pytest --snapshot-update x"
COMMAND = f"  accept: {ACCEPT}"


def comm(changes=1, cost=(), **known):
    return FailureText(
        head="comm_mode differs from a.ws4.comm",
        compared="comm_mode",
        snapshot="a.ws4.comm",
        cost=cost,
        changes=tuple(f"layers.{n}: {known.pop('text', 'changed')}" for n in range(changes)),
        causes=("one", "two"),
        **known,
    )


def tree(changes=1):
    return FailureText(
        head="fsdp_tree differs from a.ws4.tree.comm",
        compared="fsdp_tree",
        snapshot="a.ws4.tree.comm",
        changes=tuple(f"norm.{n}: becomes a root" for n in range(changes)),
    )


def missing(name):
    return FailureText(head=f"there is no snapshot a.{name} yet", is_missing=True)


def test_failure_text_of_one_change_has_all_lines():
    text = comm(cost=("+1 % bytes",), notes=("odd",))
    assert failure_lines({"": text}, accept=ACCEPT, everything=True) == (
        "comm_mode differs from a.ws4.comm",
        "  +1 % bytes",
        "  layers.0: changed",
        "  likely: one",
        "  likely: two",
        "  note: odd",
        COMMAND,
    )


def test_eight_lines_end_with_the_command():
    assert failure_lines({"comm": comm(9, cost=("a", "b", "c"))}, accept=ACCEPT) == (
        "comm_mode differs from a.ws4.comm",
        "  a",
        "  b",
        "  layers.0: changed",
        "  layers.1: changed",
        "  ... and 8 more lines (-vv)",
        "  likely: one",
        COMMAND,
    )


def test_two_values_share_a_head_and_take_turns():
    texts = {"comm": comm(5, cost=("+1 % bytes",)), "tree": tree(4)}
    assert failure_lines(texts, accept="") == (
        "comm_mode and fsdp_tree differ from a.ws4 (2 files)",
        "  comm: +1 % bytes",
        "  comm: layers.0: changed",
        "  tree: norm.0: becomes a root",
        "  comm: layers.1: changed",
        "  tree: norm.1: becomes a root",
        "  ... and 5 more changes (-vv)",
        "  likely: one",
    )
    lines = failure_lines(texts, accept=ACCEPT, everything=True)
    assert len(lines) == 1 + 1 + 5 + 4 + 2 + 1


@pytest.mark.parametrize(
    ("training", "cost", "changes", "shown"),
    [
        # All fit: one more line is shortened, as "1 more" would take a line, too.
        ([], [100, 90], [99], "100 90 99"),
        ([130], [115, 100], [150], "130 115 100 150"),
        ([], [115, 100], [180, 200], "115 100 180 200"),
        # Whole lines say more than the beginnings of many.
        ([], [115, 100], [130, 120, 110], "115 100 130 2"),
        # Lines about training are never shortened; hidden costs are counted.
        ([170, 170], [115, 100], [130], "170 170 3"),
        ([170, 200], [], [90], "170 2"),
    ],
)
def test_long_lines_are_cut_before_they_are_left_out(training, cost, changes, shown):
    def written(name, lengths):
        return tuple(f"{name}{length} ".ljust(length - 2, "-") for length in lengths)

    text = replace(
        comm(0, cost=written("c", cost)),
        training=written("t", training),
        changes=written("x", changes),
        causes=("l" * 100,),
    )
    command = "pytest --snapshot-update " + "n" * 100
    lines = failure_lines({"": text}, accept=command)
    assert lines[-1] == f"  accept: {command}"
    assert len(lines) <= 8
    assert sum(map(len, lines)) <= 660
    assert " ".join(re.findall(r"\d+", " ".join(lines[1:-2]))) == shown
    assert not [line for line in lines if line.startswith("  t") and line.endswith("...")]


def test_line_that_is_cut_keeps_its_place():
    sent = "lm_head split off from unit (root): " + "-" * 200
    text = replace(comm(0), changes=(f"{sent}, at examples/train.py:43", f"{sent} at {'x' * 100}"))
    _, first, second, *_ = failure_lines({"": text}, accept="n" * 300)
    assert first.endswith("---... at examples/train.py:43")
    assert second.endswith("---...")
    assert abs(len(first) - len(second)) <= 1


def test_a_value_without_a_file_has_a_head_of_its_own():
    assert failure_lines({"comm": missing("comm"), "tree": missing("tree")}, accept=ACCEPT) == (
        "2 comparisons failed",
        "  comm: there is no snapshot a.comm yet",
        "  tree: there is no snapshot a.tree yet",
        f"  record it: {ACCEPT}",
        "  then read the file, and commit it with the test",
    )
    lines = failure_lines({"comm": comm(), "tree": missing("tree")}, accept=ACCEPT)
    assert lines[:4] == (
        "2 comparisons failed",
        "  comm: comm_mode differs from a.ws4.comm",
        "  tree: there is no snapshot a.tree yet",
        "  comm: layers.0: changed",
    )
    assert lines[-1] == COMMAND


def test_missing_snapshots_keep_the_command_to_record():
    texts = {
        name: FailureText(
            head=f"there is no snapshot snapshots/tests/test_models/test_step.ws4.{name} yet",
            changes=(f"  was the test renamed? git mv {'a' * 100} {'b' * 100}",),
            is_missing=True,
        )
        for name in ("comm", "tree")
    }
    accept = "pytest --snapshot-update tests/test_models.py::test_step"
    lines = failure_lines(texts, accept=accept)
    assert [line.partition(":")[0].strip() for line in lines] == [
        *("2 comparisons failed", "comm", "tree", "comm", "tree"),
        *("record it", "then read the file, and commit it with the test"),
    ]
    assert sum(map(len, lines)) <= 660
    assert len(failure_lines(texts, accept=accept, everything=True)) == 7


def test_an_error_is_shown_as_it_is():
    text = FailureText.of_text("first\n  second\nthird")
    assert failure_lines({"comm": text}, accept="") == ("first", "  second", "third")


def test_scope_is_in_head_and_cure_above_command():
    relaxed = comm().within("sizes apart", "pass the option")
    assert relaxed.head == "comm_mode differs from a.ws4.comm, sizes apart"
    lines = failure_lines({"comm": relaxed, "tree": tree()}, accept=ACCEPT)
    assert lines[0] == "comm_mode and fsdp_tree differ from a.ws4 (2 files), sizes apart"
    assert lines[-2:] == ("  fix: pass the option", COMMAND)


def test_tree_changes_share_line_and_causes_come_once():
    changes = [
        TreeChange(subject="layers.{0..3}", what="becomes a root", likely="no root"),
        TreeChange(subject="layers.{0..3}", what="reshard True -> False", likely="no root"),
    ]
    assert render_tree_changes(changes, snapshot="s").lines == (
        "fsdp_tree differs from s",
        "  layers.{0..3}: becomes a root, reshard True -> False",
        "  likely: no root",
    )


def test_regression_comes_first_with_its_cause():
    """Gradients reduced too often come before other dtypes, the larger change."""
    old = profile()
    comparison = compare(old, reduced_often(in_bfloat16(old)))
    explained = render_comparison(comparison, snapshot="x")
    reduced = "gradients of (root), layers.{0..2} reduced 1 -> 4 times (reduce_scatter)"
    assert headline_of_steps(comparison) == f"{reduced}, gathers unchanged, 1 more change"
    assert [line.partition("; likely: ")[0] for line in explained.summaries] == [
        f"{reduced}, gathers unchanged",
        "parameters[dp], gradients[dp] float32 -> bfloat16, x1/2 bytes",
    ]
    causes = [line.partition("; likely: ")[2] for line in explained.summaries]
    assert causes[0].startswith("reduced in each micro-batch, or in several backwards of one")
    assert causes[1] == "MixedPrecisionPolicy, or the dtype of the model's parameters"
    # The same order on the terminal, before what it costs.
    assert explained.training[0].startswith(reduced)
    assert "bfloat16" in explained.training[1]
    assert explained.differences == (*explained.training, *explained.cost)


def breaking(text, *lines):
    return replace(text, training=lines, summaries=(*lines, *text.summaries))


def test_training_change_comes_before_cost():
    """Trees come after recordings, and costs are cut before what breaks training."""
    texts = {
        "tree": breaking(tree(3), "lora: no longer managed"),
        "comm": breaking(comm(3, cost=("+1 % in all", "more")), "gradients lost", "and late"),
    }
    first = ["  comm: gradients lost", "  comm: and late", "  tree: lora: no longer managed"]
    whole = failure_lines(texts, accept="", everything=True)
    assert list(whole[1:6]) == [*first, "  comm: +1 % in all", "  comm: more"]
    assert list(failure_lines(texts, accept=ACCEPT)[1:4]) == first
    assert summary_lines(texts.values()) == (
        "gradients lost",
        "and late",
        "lora: no longer managed",
    )
    many = {"": breaking(comm(3, cost=("+1 %",)), *(f"lost {n}" for n in range(9)))}
    lines = failure_lines(many, accept=ACCEPT)
    assert lines[1:5] == tuple(f"  lost {n}" for n in range(4))
    assert lines[5] == "  ... and 9 more lines (-vv)"
