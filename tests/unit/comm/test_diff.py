"""What differs between two profiles, why, and how it reads."""

import dataclasses

import pytest

from pytest_fsdp_comm.comm.causes import find_causes
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import MeshAxis, Phase
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    Site,
    restrict,
    sort_rows,
)
from pytest_fsdp_comm.reports.comm_changes import render_comparison

KIB = 1024
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
LAYERS = tuple(f"layers.{number}" for number in range(4))


def row(phase, owner, kind, count=1, nbytes=KIB, **changes):
    return CommRow(
        phase=phase, owner=owner, kind=kind, axis="dp", count=count, nbytes=nbytes, **changes
    )


def profile(*rows, reshards=(), redistributions=(), **changes):
    values = {"world_size": 4, "mesh_axes": (MeshAxis(name="dp", size=4),), **changes}
    return CommProfile(
        rows=sort_rows(rows), reshards=reshards, redistributions=redistributions, **values
    )


def step(*, forward=1, backward=1, reduces=1, owners=("", *LAYERS), nbytes=KIB):
    rows = [row(FORWARD, owner, "all_gather", forward, forward * nbytes) for owner in owners]
    if backward:
        rows += [
            row(BACKWARD, owner, "all_gather", backward, backward * nbytes)
            for owner in owners
            if owner
        ]
    rows += [row(BACKWARD, owner, "reduce_scatter", reduces, reduces * nbytes) for owner in owners]
    return rows


def test_equal_profiles_have_no_changes():
    assert compare(profile(*step()), profile(*step())).changes == ()
    assert compare(profile(*step()), profile(*step())).causes == ()


def test_siblings_that_change_alike_are_one_change():
    (change,) = compare(profile(*step()), profile(*step(backward=0))).changes
    assert (change.phase, change.owners, change.what) == (BACKWARD, LAYERS, "all_gather[dp]")
    assert [(amount.count, amount.nbytes) for amount in change.before] == [(1, KIB)]
    assert change.after == ()


def test_world_mesh_reshards_and_redistributions_are_compared():
    old = profile(
        reshards=(ReshardRow(phase=FORWARD, module="a", action="reshard", count=1),),
        redistributions=(RedistributionRow(phase=FORWARD, owner="a", change="x->y", count=1),),
    )
    new = dataclasses.replace(profile(), world_size=8, mesh_axes=(MeshAxis(name="tp", size=8),))
    changes = compare(old, new).changes
    assert [(change.subject, change.what) for change in changes] == [
        ("world_size", "world_size"),
        ("mesh", "mesh"),
        ("reshard", "reshard"),
        ("redistribution", "x->y"),
    ]


def test_a_difference_between_ranks_is_a_difference():
    same = profile(row(FORWARD, "a", "all_gather"))
    some = profile(row(FORWARD, "a", "all_gather", ranks=(0, 1)))
    assert compare(same, some).changes
    assert compare(some, same).changes


def test_simulated_ranks_are_compared_with_their_part():
    whole = profile(
        row(FORWARD, "a", "all_gather", ranks=(0, 1)),
        row(FORWARD, "a", "all_gather", 2, ranks=(2, 3)),
    )
    part = profile(row(FORWARD, "a", "all_gather"), recorded_ranks=(0,))
    assert compare(whole, part).changes == ()
    assert restrict(whole, (0, 2)).rows[0].ranks == (0,)
    other = profile(row(FORWARD, "a", "all_gather", 3), recorded_ranks=(0,))
    assert len(compare(whole, other).changes) == 1


def causes(old, new):
    return find_causes(profile(*old), profile(*new))


@pytest.mark.parametrize(
    ("old", "new", "beginnings"),
    [
        (step(), step(backward=0), ["layers.{0..3} stays gathered between forward and backward"]),
        (step(backward=0), step(), ["layers.{0..3} is freed after forward and gathered again"]),
        (step(), step(reduces=4), ["gradients of (root), layers.{0..3} are reduced more often"]),
        (
            step(),
            step(backward=0, owners=LAYERS),
            [
                "the root is no longer an FSDP unit",
                "layers.{0..3} stays gathered between forward and backward",
            ],
        ),
        (
            step(),
            [*step(), row(FORWARD, "lm_head", "all_gather", 4)],
            ["lm_head is called 4 times in one forward"],
        ),
        (
            step(owners=LAYERS),
            [*step(owners=LAYERS[1:]), row(BACKWARD, "layers.0", "all_reduce")],
            ["layers.0 is replicated instead of sharded"],
        ),
        (
            step(owners=("a", "b")),
            step(owners=("a", "c")),
            ["modules were renamed or moved: b is now c"],
        ),
        (step(), step(nbytes=2 * KIB), ["the same collectives carry twice the bytes"]),
        (step(), step(nbytes=KIB // 2), ["the same collectives carry half the bytes"]),
        # No pattern: nothing is guessed.
        (step(), step(nbytes=3 * KIB), []),
        (step(), step(forward=2, backward=2, reduces=2), []),
        (step(), [*step(), row(Phase.OUTSIDE, None, "all_reduce")], []),
    ],
)
def test_each_change_has_its_likely_cause(old, new, beginnings):
    found = causes(old, new)
    assert len(found) == len(beginnings), found
    for cause, beginning in zip(found, beginnings, strict=True):
        assert cause.startswith(beginning)


def rendered(old, new, **changes):
    return render_comparison(
        compare(old, new), snapshot="s.comm", accept="pytest --snapshot-update", **changes
    )


def test_the_text_of_a_change_names_site_cause_and_remedy():
    site = Site(issued_in="layers.1", call_site="model.py:88", dtype="float32", count=2)
    old = profile(row(FORWARD, "layers.2", "all_gather"))
    new = profile(row(FORWARD, "layers.2", "all_gather", 2, 2 * KIB, sites=(site,)))
    text = rendered(old, new, notes=("odd",))
    assert text.full == (
        "comm_mode differs from s.comm",
        "  layers.2 forward: all_gather[dp] 1 -> 2 (+1), 1.0 KiB -> 2.0 KiB per rank, issued in "
        "layers.1 at model.py:88",
        "  likely: layers.2 is called 2 times in one forward (per chunk of the loss?) and gathered "
        "for each call: unshard it once around the loop, or leave it in its parent's unit",
        "  note: odd",
        "  accept: pytest --snapshot-update",
    )
    assert [line for line in text.full if line not in text.short] == ["  note: odd"]


def test_ranks_that_differ_are_named():
    old = profile(row(FORWARD, "a", "all_gather"))
    new = profile(row(FORWARD, "a", "all_gather", 2, 2 * KIB, ranks=(0, 1)))
    assert rendered(old, new).full[1] == (
        "  a forward: all_gather[dp] 1 (1.0 KiB) on all ranks -> 2 (2.0 KiB) on ranks 0, 1"
    )


def test_a_long_text_is_cut_where_pytest_would_cut_it():
    owners = [f"module_{letter}" for letter in "abcdefghijklmnop"]
    new = [
        row(FORWARD, owner, "all_gather", 2 + place, KIB * (2 + place))
        for place, owner in enumerate(owners)
    ]
    text = rendered(profile(*step(owners=owners)), profile(*new))
    assert len(text.short) <= 8
    assert sum(map(len, text.short)) <= 600
    assert text.short[0] == "comm_mode differs from s.comm"
    assert text.short[-1] == "  accept: pytest --snapshot-update"
    assert any("more changes, below" in line for line in text.short)
    assert text.is_cut
    # The largest growth comes first.
    assert text.short[1].startswith("  module_p forward")
