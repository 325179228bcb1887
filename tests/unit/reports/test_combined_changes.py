"""Several failed comparisons of one assertion, told in the room of one."""

import pytest

from pytest_fsdp_comm.reports.comm_changes import Explanation, combine


def explanation(*short, **values):
    return Explanation(short=short, full=short, is_cut=False, **values)


@pytest.mark.parametrize("accept", ["pytest --snapshot-update x", ""])
def test_what_is_left_out_is_said_with_and_without_a_command(accept):
    command = [f"  accept: {accept}"] if accept else []
    more = explanation(
        "comm_mode differs from a", "  one", "  ... and 7 more changes, below", *command
    )
    told = combine([("comm", more), ("tree", explanation("a broken file"))], accept=accept)
    assert told == (
        "2 comparisons failed",
        "  comm: comm_mode differs from a",
        "  comm: one",
        "  tree: a broken file",
        "  ... and more, below",
        *command,
    )


def test_nothing_is_left_out():
    parts = [
        ("comm", explanation("x", "  one", compared="comm_mode", snapshot="a.ws4.comm")),
        ("tree", explanation("y", "  two", compared="fsdp_tree", snapshot="a.ws4.tree.comm")),
    ]
    assert combine(parts, accept="") == (
        "comm_mode and fsdp_tree differ from a.ws4 (2 files)",
        "  comm: one",
        "  tree: two",
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (20, ["comm: cost", "comm: one", "comm: three", "tree: two"]),
        (200, ["comm: cost", "comm: one", "tree: two", "... and more, below"]),
        (400, ["comm: one", "tree: two", "... and more, below"]),
    ],
)
def test_what_a_change_costs_comes_before_it_where_there_is_room(length, expected):
    cost = "  cost" + length * "."
    three = "  three" + 200 * "."
    one = "  one" + 200 * "."
    parts = [
        ("comm", explanation("x", cost, one, three, cost=(cost,), compared="comm_mode")),
        ("tree", explanation("y", "  two", compared="fsdp_tree")),
    ]
    _, *lines = combine(parts, accept="")
    assert [line.strip().rstrip(".") for line in lines] == expected
