"""The text of failed comparisons, of which pytest prints up to 8 lines."""

import re
from dataclasses import replace

import pytest
from report_values import failure_of
from sample_profiles import FORWARD, in_bfloat16, made, profile, reduced_often, row

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.changes import render_comparison, render_tree_changes
from pytest_fsdp_comm.reports.explanation import (
    NO_SNAPSHOT,
    Failure,
    Statement,
    failure_lines,
    failure_sort_key,
    join_failures,
    split_failure_lines,
    summarize_changes,
    write_headline,
)
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.tree.diff import TreeChange

ACCEPT = "pytest --snapshot-update x"
COMMAND = f"  accept: {ACCEPT}"


def comm(changes=1, **known):
    return failure_of(
        change=tuple(f"layers.{n}: changed" for n in range(changes)),
        likely=("one", "two"),
        **known,
    )


def tree(changes=1, **known):
    return failure_of(
        "fsdp_tree differs from a.ws4.tree.comm",
        compared="fsdp_tree",
        change=tuple(f"norm.{n}: becomes a root" for n in range(changes)),
        **known,
    )


def missing(name):
    return Failure.from_error(f"there is no snapshot a.{name} yet", NO_SNAPSHOT)


def join(values, accept=ACCEPT):
    command, _, test = accept.rpartition(" ")
    return join_failures(values, command=command and f"{command} ", test=test)


def lines_of(values, accept=ACCEPT):
    return failure_lines(join(values, accept))


def split_lines_of(values, accept=ACCEPT):
    return split_failure_lines(join(values, accept))


@pytest.mark.parametrize(("nbytes", "is_second"), [(1_000_000, True), (10, False)])
def test_row_that_changes_most_bytes_is_second(nbytes, is_second):
    """Behind a step that explains fewer bytes."""

    def with_activations(old, count):
        sent = row(FORWARD, "layers.0.mlp", "all_gather", nbytes, "activations", count=count)
        return made([*old.rows, sent])

    shorter = made([one for one in profile().rows if one.owner != "layers.2"])
    sides = with_activations(profile(), 2), with_activations(shorter, 5)
    failure = render_comparison(compare(*sides), snapshot="s")
    assert failure.changes[0].text.startswith("layers: 3 -> 2 modules")
    text = "layers.0.mlp in forward: all_gather[dp] 2 -> 5 (+3)"
    assert [entry.text.startswith(text) for entry in failure.changes[1:]] == [True] * is_second
    assert any(entry.text.startswith(text) for entry in failure.statements)


def test_failure_text_of_one_change_has_all_lines():
    text = comm(cost=("+1 % bytes",), rest=("other: changed",), note=("odd",))
    assert lines_of({"": text}) == (
        "comm_mode differs from a.ws4.comm",
        "  layers.0: changed",
        "  likely: one",
        "  likely: two",
        "  cost: +1 % bytes",
        "  other: changed",
        "  note: odd",
        COMMAND,
    )


def test_eight_lines_end_with_the_command():
    """The other lines are printed below the failure."""
    values = {"comm": comm(9, cost=("a", "b"), rest=("c",))}
    lines, below = split_lines_of(values)
    assert lines == (
        "comm_mode differs from a.ws4.comm",
        *(f"  layers.{n}: changed" for n in range(5)),
        "  ... and 9 more lines below",
        COMMAND,
    )
    assert (*lines[:6], *below, COMMAND) == lines_of(values)


def test_eight_short_lines_are_not_split():
    lines, below = split_lines_of({"": comm(2, cost=("a",), rest=("b",))})
    assert (len(lines), below) == (8, ())


@pytest.mark.parametrize(("lengths", "shown"), [([300, 200, 150], 2), ([300, 300], 1), ([700], 0)])
def test_long_lines_are_never_cut(lengths, shown):
    values = {"": failure_of(change=tuple("x" * length for length in lengths), cost=("a",))}
    lines, below = split_lines_of(values)
    assert lines[1:-2] == tuple("  " + "x" * length for length in lengths[:shown])
    assert (*lines[:-2], *below, COMMAND) == lines_of(values)
    assert sum(map(len, lines)) <= 660


def test_very_long_command_is_below():
    lines, below = split_lines_of({"": comm()}, "pytest " + "x" * 700)
    assert lines == ("comm_mode differs from a.ws4.comm", "  ... the other lines are below")
    assert below[0] == "  layers.0: changed"
    assert below[-1] == "  accept: pytest " + "x" * 700


def test_lines_below_contain_what_many_missing_snapshots_hide():
    values = {"comm": comm(1), **{name: missing(name) for name in "abcdefgh"}}
    lines, below = split_lines_of(values)
    assert "  layers.0: changed" in below
    assert lines[-1] == COMMAND


def test_two_values_share_a_head_and_take_turns():
    """The only recording needs no name."""
    texts = {"comm": comm(5, cost=("+1 % bytes",)), "tree": tree(4)}
    assert lines_of(texts, "") == (
        "comm_mode and fsdp_tree differ from a.ws4 (2 files)",
        "  layers.0: changed",
        "  tree: norm.0: becomes a root",
        "  layers.1: changed",
        "  tree: norm.1: becomes a root",
        *(f"  layers.{n}: changed" for n in range(2, 3)),
        "  tree: norm.2: becomes a root",
        "  layers.3: changed",
        "  tree: norm.3: becomes a root",
        "  layers.4: changed",
        "  likely: one",
        "  likely: two",
        "  cost: +1 % bytes",
    )
    stages = {"first": comm(cost=("+1 %",)), "second": comm(cost=("+2 %",))}
    assert lines_of(stages, "")[1:] == (
        "  first: layers.0: changed",
        "  second: layers.0: changed",
        "  likely: one",
        "  likely: two",
        "  cost: first: +1 %",
        "  cost: second: +2 %",
    )


def test_a_value_without_a_file_has_a_head_of_its_own():
    assert lines_of({"comm": missing("comm"), "tree": missing("tree")}) == (
        "2 snapshots are missing",
        "  comm: there is no snapshot a.comm yet",
        "  tree: there is no snapshot a.tree yet",
        f"  record it: {ACCEPT}",
        "  then read the file, and commit it with the test",
    )
    lines = lines_of({"comm": comm(), "tree": missing("tree")})
    assert lines[:4] == (
        "2 comparisons failed",
        "  comm: comm_mode differs from a.ws4.comm",
        "  tree: there is no snapshot a.tree yet",
        "  layers.0: changed",
    )
    assert lines[-1] == COMMAND


def test_missing_snapshots_keep_the_command_to_record():
    texts = {
        name: Failure.from_error(
            f"there is no snapshot snapshots/tests/test_models/test_step.ws4.{name} yet\n"
            f"  was the test renamed? mv -n {'a' * 100} {'b' * 100}",
            NO_SNAPSHOT,
        )
        for name in ("comm", "tree")
    }
    accept = "pytest --snapshot-update tests/test_models.py::test_step"
    lines = lines_of(texts, accept)
    assert [line.partition(":")[0].strip() for line in lines] == [
        *("2 snapshots are missing", "comm", "tree", "comm", "tree"),
        *("record it", "then read the file, and commit it with the test"),
    ]
    lines, below = split_lines_of(texts, accept)
    assert sum(map(len, lines)) <= 660
    assert lines[-2].startswith("  record it: ")
    assert [line.partition(":")[0].strip() for line in below] == ["tree"]


def test_an_error_is_shown_as_it_is():
    text = Failure.from_error("first\n  second\nthird", "odd")
    assert lines_of({"comm": text}, "") == ("first", "  second", "third")
    assert write_headline(text) == "odd"


def test_second_change_precedes_tree_that_only_repeats_a_cause():
    def lines(cause):
        both = comm(2)
        causes = {"layers.0: changed": (cause,)}
        statements = tuple(
            replace(entry, causes=causes.get(entry.text, ())) for entry in both.statements
        )
        texts = {"comm": replace(both, statements=statements), "tree": tree(1)}
        return [line.strip() for line in lines_of(texts, "")[1:4]]

    tree_line = "tree: norm.0: becomes a root"
    repeated = ["layers.0: changed", "layers.1: changed", tree_line]
    assert lines("norm.0 becomes a root, as the tree shows") == repeated
    # This cause does not say which parameters.
    assert lines("no longer frozen, as the tree shows") == [
        "layers.0: changed",
        tree_line,
        "layers.1: changed",
    ]


def test_two_recordings_share_the_first_lines():
    """Their changes may have no subject that a cause could repeat."""
    one, other = (
        replace(
            comm(0),
            statements=tuple(
                Statement(severity="change", text=f"calls of {name} {at}", causes=("a loop",))
                for at in range(2)
            ),
        )
        for name in ("student", "teacher")
    )
    lines = lines_of({"one": one, "other": other}, "")
    assert [line.strip() for line in lines[1:3]] == [
        "one: calls of student 0",
        "other: calls of teacher 0",
    ]


def test_scope_is_in_head_and_cure_above_command():
    head = "comm_mode differs from a.ws4.comm, sizes apart"
    relaxed = failure_of(head, snapshot="a.ws4.comm", scope="sizes apart", fix=("pass the option",))
    lines = lines_of({"comm": relaxed, "tree": tree()})
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
    reduced = f"{reduced}, gathered as often as before"
    assert write_headline(explained) == f"{reduced}, 1 more change"
    summaries = summarize_changes(explained)
    assert [line.partition("; likely: ")[0] for line in summaries] == [
        reduced,
        "parameters[dp], gradients[dp] float32 -> bfloat16, half the bytes",
    ]
    causes = [line.partition("; likely: ")[2] for line in summaries]
    assert causes[0].startswith("reduced in each micro-batch, or in several backwards of one")
    assert causes[1] == "MixedPrecisionPolicy, or the dtype of the model's parameters"
    # The same order on the terminal, before what it costs.
    severities = [row.severity for row in explained.rows]
    assert severities[:2] == ["change", "change"]
    assert {*severities[2:4]} == {"likely"}
    assert {*severities[4:]} == {"cost"}
    assert explained.body[0] == f"  {reduced}"


def test_training_change_comes_before_others():
    """Trees come after recordings, and costs are cut before what breaks training."""
    texts = {
        "tree": tree(3, breaks_training=("lora: no longer managed",)),
        "comm": comm(
            3, cost=("+1 % in all", "more"), breaks_training=("gradients lost", "and late")
        ),
    }
    first = [
        "  breaks training: gradients lost",
        "  breaks training: and late",
        "  breaks training: tree: lora: no longer managed",
    ]
    lines = lines_of(texts)
    assert [*lines[1:4]] == first
    assert [*lines[-3:-1]] == ["  cost: +1 % in all", "  cost: more"]
    assert lines[-1] == f"  accept, although it breaks training: {ACCEPT}"


def test_ranks_that_diverge_come_first():
    """They are worse than what breaks training on all ranks."""
    diverging = "ranks diverge at call #2 over dp: rank 1 gathers layers.2, rank 0 layers.1"
    failure = comm(breaks_training=("gradients lost",), ranks_diverge=(diverging,))
    lines = lines_of({"": failure})
    assert lines[1:3] == (f"  {diverging}", "  breaks training: gradients lost")
    assert failure.severity == "ranks diverge"
    assert write_headline(failure) == f"{diverging}, 2 more changes"


def test_sort_keys_differ_only_if_training_is_wrong():
    diverging, broken = comm(ranks_diverge=("x",)), comm(breaks_training=("x",))
    others = [comm(), comm(0), missing("tree"), Failure.from_error("x"), None]
    first, second, *rest = map(failure_sort_key, (diverging, broken, *others))
    assert first < second < min(rest)
    assert len({*rest}) == 1


def test_failure_survives_json():
    failure = join_failures(
        {"comm": comm(breaks_training=("x",), cost=("y",)), "tree": missing("tree")},
        command="pytest ",
        test="t",
    )
    assert from_json(Failure, to_json(failure)) == failure
    assert write_headline(failure) == "breaks training: x, 1 more change; tree: no snapshot yet"


@pytest.mark.parametrize(
    "name",
    ["::stop-commands::x", "##[error]x", "\r::error::x", "\n ::error::x", "\x1b[31m##vso[x]"],
)
def test_names_start_no_commands_in_a_failure(name):
    severities = ("breaks training", "change", "likely", "cost", "rest", "note", "fix")
    statements = tuple(Statement(severity=severity, text=name) for severity in severities)
    failure = Failure(head=name, compared="comm_mode", statements=statements)
    for line in (
        *failure_lines(failure),
        write_headline(failure),
        *(entry.summary for entry in statements),
    ):
        assert line.isprintable()
        assert not re.search(r"^\s*::|##\w*\[", line)


def test_command_that_moves_a_snapshot_is_never_cut():
    move = f"mkdir -p {'a' * 100} && mv -n {'b' * 200} {'c' * 200}"
    lost = Failure.from_error(f"there is no snapshot yet\nidentical: {move}", NO_SNAPSHOT)
    lines, below = split_lines_of({"a": lost, "b": lost})
    assert [line.partition(":")[0] for line in lines if "mv -n" in line] == []
    assert [*below] == [f"  {name}: identical: {move}" for name in "ab"]
