"""What still differs where sizes of activations are not compared."""

from dataclasses import replace

import pytest
from sample_profiles import counted, times

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, Row, merge, remove_activation_sizes


def row(nbytes, role, *, count=2, dtype="float32", kind="all_to_all", axis="ep", **changes):
    calls = (Calls(count=count, nbytes=nbytes, dtype=dtype, role=role, **changes),)
    return Row(phase=Phase.FORWARD, owner="a", what=kind, axis=axis, calls=calls)


def profile(*rows, **changes):
    axes = sorted({row.axis for row in rows} - {""})
    return CommProfile(
        world_size=4,
        mesh_axes=tuple(MeshAxis(name=name, size=4, dims=((4, 1),)) for name in axes),
        rows=rows,
        **changes,
    )


RESHARD = counted("reshard", Phase.FORWARD, "a", "reshard")
MOVED = counted("redistribution", Phase.FORWARD, "a", "(P)->(R)")
OLD = profile(row(64, "activations"), RESHARD, MOVED)


def sending(one):
    """`OLD` with another row of what is sent."""
    return replace(OLD, rows=(one, RESHARD, MOVED))


PASS = {
    "larger activations": sending(row(128, "activations")),
    "some of them larger": sending(
        replace(
            OLD.rows[0],
            calls=(
                Calls(count=1, nbytes=0, dtype="float32", role="activations"),
                Calls(count=1, nbytes=96, dtype="float32", role="activations"),
            ),
        )
    ),
}
FAIL = {
    "a count": (OLD, sending(row(64, "activations", count=3))),
    "an element type": (OLD, sending(row(64, "activations", dtype="bfloat16"))),
    "a kind": (OLD, sending(row(64, "activations", kind="all_gather"))),
    "an axis": (OLD, profile(row(64, "activations", axis="tp"), RESHARD, MOVED)),
    "asynchronous": (OLD, sending(row(64, "activations", is_async=True))),
    "another role": (OLD, sending(row(64, "gradients"))),
    "bytes of parameters": (profile(row(64, "parameters")), profile(row(128, "parameters"))),
    "bytes of gradients": (profile(row(64, "gradients")), profile(row(128, "gradients"))),
    "bytes of what is unknown": (profile(row(64, "")), profile(row(128, ""))),
    "a reshard": (OLD, replace(OLD, rows=(OLD.rows[0], MOVED))),
    "a redistribution": (OLD, replace(OLD, rows=(OLD.rows[0], RESHARD, times(MOVED, 2)))),
}


def relaxed(old, new):
    return compare(remove_activation_sizes(old), remove_activation_sizes(new)).changes


@pytest.mark.parametrize("what", PASS)
def test_sizes_of_activations_may_change(what):
    assert compare(OLD, PASS[what]).changes
    assert relaxed(OLD, PASS[what]) == ()


@pytest.mark.parametrize("what", FAIL)
def test_nothing_else_may_change(what):
    assert relaxed(*FAIL[what])
    assert relaxed(FAIL[what][0], FAIL[what][0]) == ()


@pytest.mark.parametrize("other", [OLD, PASS["larger activations"]])
def test_unknown_size_of_one_side_is_one_change(other):
    for old, new, texts in (
        (remove_activation_sizes(OLD), other, ("not compared", "compared")),
        (other, remove_activation_sizes(OLD), ("compared", "not compared")),
    ):
        (change,) = compare(old, new).changes
        assert (change.what, change.old_text, change.new_text) == ("activation sizes", *texts)
    fewer = replace(other, rows=(row(64, "activations", count=1), RESHARD, MOVED))
    assert len(compare(remove_activation_sizes(OLD), fewer).changes) == 2


def test_ranks_that_differ_only_in_sizes_share_a_line():
    """As with experts, whose tokens each rank gets in other amounts."""
    uneven, even = PASS["some of them larger"], OLD
    merged = merge([uneven, even, even], ranks=(0, 1, 3))
    assert [held.ranks for held in merged.collectives] == [(0,), (1, 3)]
    assert [held.ranks for held in remove_activation_sizes(merged).collectives] == [()]
    fewer = sending(row(64, "activations", count=1))
    merged = merge([uneven, even, fewer, even], ranks=range(4))
    assert [held.ranks for held in remove_activation_sizes(merged).collectives] == [
        (0, 1, 3),
        (2,),
    ]


def test_totals_leave_the_bytes_out():
    (total,) = remove_activation_sizes(
        profile(
            replace(
                OLD.rows[0],
                calls=(
                    Calls(count=1, nbytes=64, dtype="float32", role="activations"),
                    Calls(count=1, nbytes=64, dtype="float32", role="parameters"),
                ),
            )
        )
    ).totals()
    assert (total.count, total.nbytes) == (2, 64)
