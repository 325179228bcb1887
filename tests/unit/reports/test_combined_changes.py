"""Several failed comparisons of one assertion, told in the room of one."""

import pytest

from pytest_fsdp_comm.reports.comm_changes import Explanation, combine


def explanation(*short, compared="", snapshot=""):
    return Explanation(
        short=short, full=short, is_cut=False, compared=compared, snapshot=snapshot
    )  # fmt: skip


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
