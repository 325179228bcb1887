"""Failed comparisons of one assertion, shown on one screen."""

import math
import re

import pytest
from sample_profiles import in_bfloat16, profile, reduced_often

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.ci.outcomes import Comparisons, FailedTest, Outcomes
from pytest_fsdp_comm.reports.ci.review import render_summary
from pytest_fsdp_comm.reports.comm_changes import render_comparison
from pytest_fsdp_comm.reports.explanation import (
    Failure,
    FailureText,
    combine,
    show_everything,
    show_on_screen,
)
from pytest_fsdp_comm.reports.headline import headline, headline_of_steps

ACCEPT = "pytest --snapshot-update x"
COMMAND = f"  accept: {ACCEPT}"


def failure(name, *short, full=None, difference=(), compared="", snapshot="", cost=()):
    explanation = FailureText(
        short=short,
        full=full or short,
        compared=compared,
        snapshot=snapshot,
        cost=cost,
    )
    return Failure(name=name, explanation=explanation, difference=tuple(difference))


def comm(changes, *, name="", difference=()):
    """A failure with some changes, of which its short form tells one."""
    lines = tuple(f"  layers.{n} forward: all_gather[dp] 1 -> 2 (+1)" for n in range(changes))
    causes = ("  likely: one", "  likely: two")
    head = "comm_mode differs from a.ws4.comm"
    more = f"  ... and {changes - 1} more changes, below"
    return failure(
        name,
        *(head, lines[0], *([more] if changes > 1 else []), causes[0], COMMAND),
        full=(head, *lines, *causes, COMMAND),
        difference=difference,
        compared="comm_mode",
        snapshot="a.ws4.comm",
    )


def tree(*, difference=()):
    lines = ("fsdp_tree differs from a.ws4.tree.comm", "  norm: becomes a root", COMMAND)
    return failure(
        "tree",
        *lines,
        difference=difference,
        compared="fsdp_tree",
        snapshot="a.ws4.tree.comm",
    )


def rows(shown):
    """Of a screen of 80 columns, with what pytest puts before its lines and the title."""
    above = sum(math.ceil((len(line) + 10) / 80) for line in shown.lines)
    return above + sum(math.ceil(len(line) / 80) for line in shown.below) + bool(shown.below)


@pytest.mark.parametrize("accept", [ACCEPT, ""])
def test_what_is_left_out_is_said_with_and_without_a_command(accept):
    command = [f"  accept: {accept}"] if accept else []
    more = failure(
        "comm", "comm_mode differs from a", "  one", "  ... and 7 more changes, below", *command
    )
    assert combine([more, failure("tree", "a broken file")], accept=accept) == (
        "2 comparisons failed",
        "  comm: comm_mode differs from a",
        "  comm: one",
        "  tree: a broken file",
        "  ... and more, below",
        *command,
    )


def test_nothing_is_left_out():
    failures = [
        failure("comm", "x", "  one", compared="comm_mode", snapshot="a.ws4.comm"),
        failure("tree", "y", "  two", compared="fsdp_tree", snapshot="a.ws4.tree.comm"),
    ]
    assert combine(failures, accept="") == (
        "comm_mode and fsdp_tree differ from a.ws4 (2 files)",
        "  comm: one",
        "  tree: two",
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (120, ["comm: cost", "comm: one", "comm: three", "tree: two"]),
        (300, ["comm: cost", "comm: one", "tree: two", "... and more, below"]),
        (500, ["comm: one", "tree: two", "... and more, below"]),
    ],
)
def test_the_cost_of_a_change_comes_first_where_there_is_room(length, expected):
    cost = "  cost" + length * "."
    three = "  three" + 200 * "."
    one = "  one" + 200 * "."
    parts = [
        failure("comm", "x", cost, one, three, cost=(cost,), compared="comm_mode"),
        failure("tree", "y", "  two", compared="fsdp_tree"),
    ]
    _, *lines = combine(parts, accept="")
    assert [line.strip().rstrip(".") for line in lines] == expected


def test_a_difference_that_fits_is_shown_once_below():
    shown = show_on_screen([comm(3, difference=["- old", "+ new"])], accept=ACCEPT)
    assert shown.lines == (
        "comm_mode differs from a.ws4.comm",
        "  layers.0 forward: all_gather[dp] 1 -> 2 (+1)",
        "  ... and 2 more changes, below",
        "  likely: one",
        COMMAND,
    )
    assert shown.below == (
        "  likely: two",
        "  layers.1 forward: all_gather[dp] 1 -> 2 (+1)",
        "  layers.2 forward: all_gather[dp] 1 -> 2 (+1)",
        "- old",
        "+ new",
    )


def test_two_failures_fill_one_screen_and_say_what_shows_the_rest():
    failures = [
        comm(40, name="comm", difference=["- old"] * 30),
        tree(difference=["- old"] * 3),
    ]
    shown = show_on_screen(failures, accept=ACCEPT)
    assert 22 <= rows(shown) <= 24
    assert shown.below[0] == "comm: a.ws4.comm"
    changes = sum("layers." in line for line in (*shown.lines, *shown.below))
    assert shown.below[-1] == (
        f"-vv shows {40 - changes} more changes and the lines of 2 files that differ"
    )
    above = [line.replace("comm: ", "") for line in shown.lines]
    assert not {*above} & {*shown.below}


def test_what_is_short_is_whole_on_the_screen():
    shown = show_on_screen([comm(1, name="comm"), tree(difference=["- old"])], accept=ACCEPT)
    assert shown.below == (
        "comm: a.ws4.comm",
        "  likely: two",
        "tree: a.ws4.tree.comm",
        "- old",
    )
    assert show_on_screen([failure("", "no snapshot")], accept="").below == ()


def missing(name):
    return failure(
        name,
        f"there is no snapshot a.{name} yet",
        f"  record it: {ACCEPT}",
        "  then read the file, and commit it with the test",
    )


@pytest.mark.parametrize("show", [show_on_screen, show_everything])
def test_a_command_is_given_once(show):
    shown = show([missing("comm"), missing("tree")], accept=ACCEPT)
    assert shown.lines == (
        "2 comparisons failed",
        "  comm: there is no snapshot a.comm yet",
        "  tree: there is no snapshot a.tree yet",
        f"  record it: {ACCEPT}",
        "  then read the file, and commit it with the test",
    )
    assert shown.below == ()
    beside = "  not compared: x"
    shown = show([comm(1, name="comm"), missing("tree")], accept=ACCEPT, beside=beside)
    assert shown.lines[-2:] == (beside, COMMAND)
    assert "  tree: there is no snapshot a.tree yet" in shown.lines
    assert not [line for line in (*shown.lines, *shown.below) if "record it" in line]


def test_what_has_no_file_to_compare_with_has_no_lines_that_differ():
    shown = show_on_screen([comm(40, name="comm"), missing("tree")], accept=ACCEPT)
    assert shown.below[-1].endswith(" more changes")
    assert 22 <= rows(shown) <= 24


def test_without_words_for_a_difference_its_first_lines_are_shown():
    only_lines = failure(
        "", "fsdp_tree differs from a", COMMAND, difference=["- old"] * 99, compared="fsdp_tree"
    )
    shown = show_on_screen([only_lines], accept=ACCEPT)
    assert shown.below[0] == "- old"
    assert rows(shown) == 24
    assert shown.below[-1] == "-vv shows the lines that differ"


def test_a_line_of_any_length_leaves_room_for_others_and_a_command_is_whole():
    command = f"  accept: pytest {'x' * 300}"
    long = failure("", "head", f"  {'a' * 3000}", command, compared="comm_mode")
    shown = show_on_screen([long], accept=command.removeprefix("  accept: "))
    assert shown.lines == ("head", f"  {'a' * 235}...", command)


def test_everything_is_all_changes_and_causes_once_and_the_whole_difference():
    failures = [comm(40, name="comm", difference=["- old"] * 30), tree(difference=["+ new"])]
    shown = show_everything(failures, accept=ACCEPT, beside="  not compared: x")
    assert shown.lines == (
        "comm_mode and fsdp_tree differ from a.ws4 (2 files)",
        *(f"  comm: layers.{n} forward: all_gather[dp] 1 -> 2 (+1)" for n in range(40)),
        "  tree: norm: becomes a root",
        "  likely: one",
        "  likely: two",
        "  not compared: x",
        COMMAND,
    )
    assert shown.below == (
        "comm: a.ws4.comm",
        *["- old"] * 30,
        "tree: a.ws4.tree.comm",
        "+ new",
    )
    alone = show_everything(failures[:1], accept=ACCEPT, beside="  not compared: x")
    assert alone.lines[-2:] == ("  not compared: x", COMMAND)
    assert len(alone.lines) == 1 + 40 + 2 + 2
    assert alone.below == ("- old",) * 30


def test_what_is_not_compared_comes_first_and_another_cure_before_the_command():
    relaxed = comm(3).explanation.within("sizes apart", "pass the option")
    assert relaxed.short == (
        "comm_mode differs from a.ws4.comm, sizes apart",
        "  layers.0 forward: all_gather[dp] 1 -> 2 (+1)",
        "  ... and 2 more changes, below",
        "  likely: one",
        "  or pass the option",
        COMMAND,
    )
    failures = [Failure(name="comm", explanation=relaxed), tree()]
    for show in (show_on_screen, show_everything):
        lines = show(failures, accept=ACCEPT).lines
        assert lines[0] == ("comm_mode and fsdp_tree differ from a.ws4 (2 files), sizes apart")
        assert lines[-2:] == ("  or pass the option", COMMAND)
        assert "  tree: norm: becomes a root" in lines
    assert comm(3).explanation.within("sizes apart").short[-2:] == ("  likely: one", COMMAND)


@pytest.mark.parametrize("has_rest", [True, False])
def test_what_pytest_would_cut_at_the_end_is_left_out_before_the_command(has_rest):
    changes = tuple(f"  {letter * 140}" for letter in "abcd")
    more = ("  ... and 7 more changes, below",) if has_rest else ()
    alone = failure(
        "",
        *("head", *changes, *more, "  likely: x", "  or pass the option", COMMAND),
        compared="comm_mode",
    )
    shown = show_on_screen([alone], accept=ACCEPT, beside=f"  not compared: {'y' * 100}")
    assert shown.lines == (
        *("head", *changes[:3], "  ... and more, below", "  likely: x", "  or pass the option"),
        f"  not compared: {'y' * 100}",
        COMMAND,
    )
    assert shown.below[0] == changes[3]


def test_what_a_change_costs_comes_first_whatever_the_order_of_the_values():
    failures = [
        failure("before", "x", "  one", compared="fsdp_tree"),
        failure("comm", "y", "  +1 % bytes", "  two", cost=("  +1 % bytes",), compared="comm_mode"),
    ]
    _, *lines = combine(failures, accept="")
    assert lines == ["  comm: +1 % bytes", "  comm: two", "  before: one"]


def test_a_regression_comes_before_the_changes_that_hide_it_and_each_has_its_cause():
    """Other element types, which are the larger change, beside gradients reduced too often."""
    old = profile()
    comparison = compare(old, reduced_often(in_bfloat16(old)))
    explained = render_comparison(comparison, snapshot="x", accept="")
    reduced = "gradients of (root), layers.{0..2} reduced 1 -> 4 times (reduce_scatter)"
    # In the fewest words, the largest change of single modules.
    assert not headline_of_steps(comparison)
    assert re.fullmatch(r"\S+: \+3 reduce_scatter( each)?, \d+ more", headline(comparison.changes))
    assert [line.partition("; likely: ")[0] for line in explained.told] == [
        f"{reduced}, gathers as before",
        "parameters[dp], gradients[dp] float32 -> bfloat16, x1/2 bytes",
    ]
    causes = [line.partition("; likely: ")[2] for line in explained.told]
    assert causes[0].startswith("reduced in each micro-batch: call set_requires_gradient_sync")
    assert causes[1] == "MixedPrecisionPolicy, or the model's own dtype"
    # The same order on the terminal.
    told = [line.strip() for line in explained.full if "reduced 1" in line or "bfloat16" in line]
    assert told[0].startswith(reduced)
    # And a line for each in the summary's table.
    failed = Comparisons(files=("x",), headline=headline(comparison.changes), told=explained.told)
    test = FailedTest(nodeid="test_a", reason=failed.headline, place=None, comparisons=failed)
    summary = render_summary(Outcomes(compared_tests=1, compared_files=1, failed=(test,)))
    (row,) = (line for line in summary.splitlines() if line.startswith("| <code>test"))
    what = row.split(" | ")[1].split("<br>")
    assert len(what) == 2
    assert all("likely: " in line for line in what)
