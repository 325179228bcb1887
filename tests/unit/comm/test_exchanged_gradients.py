"""Reductions that are lost, and look-alikes: new calls may carry the gradients instead."""

from dataclasses import replace

import pytest
from sample_profiles import (
    BACKWARD,
    DP,
    FORWARD,
    TP,
    WORLD,
    changed,
    made,
    profile,
    row,
    times,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Evidence, count_carried_elements
from pytest_fsdp_comm.tree.diff import compare_trees
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, UnitFacts

OUTSIDE = Phase.OUTSIDE
NAMES = ("a", "b", "c")
# Three gradients of 16 float32 numbers, and a forward that both sides have.
PASS = row(FORWARD, "a", "all_gather", 8, "activations", axis="tp")
APART = made([PASS, *(row(BACKWARD, name, "all_reduce", 64, "gradients") for name in NAMES)])


@pytest.mark.parametrize(
    ("new", "elements"),
    [
        ([row(OUTSIDE, None, "reduce_scatter", 192)], 48),
        # Two bytes, or one byte for each number and a scale for each 16 of them.
        ([row(OUTSIDE, None, "all_reduce", 96, dtype="bfloat16")], 48),
        (
            [
                row(OUTSIDE, None, "all_gather", 48, dtype="int8"),
                row(OUTSIDE, "x", "all_gather", 12),
            ],
            51,
        ),
        # Numbers to log, weights, and messages between stages.
        ([row(OUTSIDE, None, "all_reduce", 8)], 2),
        ([row(OUTSIDE, None, "all_gather", 192, "parameters")], 0),
        ([row(OUTSIDE, None, "send", 192)], 0),
    ],
)
def test_new_calls_may_carry_gradients(new, elements):
    sides = APART, made([PASS, *new])
    assert count_carried_elements(*sides)["dp"] == elements
    # All gradients have 48 elements.
    assert bool(compare(*sides).training) == (elements < 48)


def test_calls_over_another_axis_carry_nothing():
    sides = APART, made([PASS, row(OUTSIDE, None, "all_reduce", 192, axis="world")])
    assert count_carried_elements(*sides)["dp"] == 0
    assert compare(*sides).training


def test_calls_that_both_sides_have_carry_nothing():
    metric = row(OUTSIDE, None, "all_reduce", 400)
    sides = made([*APART.rows, metric]), made([PASS, metric])
    assert count_carried_elements(*sides).total() == 0
    assert compare(*sides).training


def test_calls_over_a_renamed_axis_are_not_new():
    metric = row(OUTSIDE, None, "all_reduce", 400)
    steps = profile().rows
    old = made([*APART.rows, *steps, metric])
    kept = [replace(one, axis="data") for one in (*steps, metric)]
    new = replace(made([PASS, *kept]), mesh_axes=(replace(DP, name="data"), TP))
    (change,) = compare(old, new).training
    # The others have no rows any more, as if they had been removed.
    assert change.owners == ("a",)


def test_unit_may_reduce_over_both_axes():
    """Instead of user code, which reduced over one of them."""
    by_hand = row(BACKWARD, "layers.0.q", "all_reduce", 64, "gradients", axis="tp")
    apart = made([*unit("layers.0"), by_hand])
    over_both = [replace(one, axis="world" if one.axis else "") for one in unit("layers.0")]
    together = replace(made(over_both), mesh_axes=(WORLD,))
    both = frozenset({"layers.0", "layers.0.q"})
    seen = Evidence(units=frozenset({"layers.0"}), trainable=both, policies={})
    assert compare(apart, together, seen).training == ()
    # The unit reduces over dp alone, or does not manage the parameter.
    assert compare(apart, made(unit("layers.0")), seen).training
    assert compare(apart, together, replace(seen, unmanaged=frozenset({"layers.0.q"}))).training
    # If both reduced over dp, the unit did not manage the parameter.
    twice = made([*unit("layers.0"), replace(by_hand, axis="dp")])
    assert compare(twice, together, seen).training


def test_units_that_no_longer_reduce_may_send_their_gradients_otherwise():
    sent = row(BACKWARD, None, "all_gather", 64)
    gradient = row(BACKWARD, "a", "all_reduce", 64, "gradients")
    (first, *_) = compare(made([PASS, gradient]), made([PASS, sent])).sentences
    assert first == (
        "gradients of a no longer reduced by all_reduce[dp], perhaps sent by new calls over dp"
    )
    (first, *_) = compare(made([PASS, gradient]), made([PASS, replace(sent, axis="tp")])).sentences
    assert "perhaps" not in first


def test_renamed_axis_has_no_new_calls_if_calls_were_lost():
    metric = row(OUTSIDE, None, "all_reduce", 4)
    old = made([*profile().rows, metric])
    new = replace(made([replace(metric, axis="data")]), mesh_axes=(replace(DP, name="data"),))
    comparison = compare(old, new)
    assert not any("new collectives over" in text for text in comparison.sentences)


SPLIT = profile(tensor_parallel=True, layers=2)
SUMS = [
    row(phase, f"layers.{number}.down", "all_reduce", 256, "activations", axis="tp")
    for number in (0, 1)
    for phase in (FORWARD, BACKWARD)
]
SUMMED = made([*SPLIT.rows, *SUMS])
EVIDENCE = Evidence(
    units=frozenset({"", "layers.0", "layers.1"}),
    policies={},
    split_axes={f"layers.{number}.down": frozenset({"tp"}) for number in (0, 1)},
)


def without_sums(*more):
    kept = [one for one in SUMS if one.phase is BACKWARD]
    return made([*SPLIT.rows, *kept, *more])


def test_partial_output_is_reported():
    (change,) = compare(SUMMED, without_sums(), EVIDENCE).training
    assert change.problem == "outputs"
    assert change.owners == ("layers.0.down", "layers.1.down")


@pytest.mark.parametrize(
    ("new", "evidence"),
    [
        # The modules are no longer split, or no tree shows that they are.
        (without_sums(), replace(EVIDENCE, split_axes={})),
        (without_sums(), None),
        # Another module reduces the outputs.
        (
            without_sums(row(FORWARD, "layers.0", "all_reduce", 256, "activations", axis="tp")),
            EVIDENCE,
        ),
        # They are reduced once instead of twice.
        (made([*SPLIT.rows, *SUMS]), EVIDENCE),
    ],
)
def test_other_lost_sums_are_no_partial_outputs(new, evidence):
    old = made([*SPLIT.rows, *(times(one, 2) for one in SUMS)]) if new == SUMMED else SUMMED
    assert compare(old, new, evidence).training == ()


def test_unit_that_is_not_called_breaks_nothing():
    old = profile()
    new = changed(
        old, lambda one: None if one.owner == "layers.1" else one, {"collective", "reshard"}
    )
    units = frozenset({"", "layers.0", "layers.1", "layers.2"})
    seen = Evidence(units=units, trainable=units, policies={})
    comparison = compare(old, new, seen)
    assert comparison.training == ()
    (cause,) = comparison.causes
    assert cause.text == "not called in this step: they are still units, as the tree shows"
    # A unit without parameters may be called.
    assert not compare(old, new, replace(seen, emptied=frozenset({"layers.1"}))).causes
    # If the tree shows that it is trained, but is no unit any more, its gradients are lost.
    assert compare(old, new, replace(seen, units=units - {"layers.1"})).training


UNIT = UnitFacts(kind="fsdp2", is_root=True, shard_axis="dp")


def tree(*, managed):
    placed = (("dp", "Shard(0)"),) if managed else ()
    norm = ParameterFacts(shape=(4, 4), dtype="float32", managed=managed, placements=placed)
    weight = ParameterFacts(shape=(4, 4), dtype="float32", placements=(("dp", "Shard(0)"),))
    return TreeFacts(
        world_size=4,
        mesh_axes=(),
        units={1: {"": UNIT}},
        parameters={"norm.weight": norm, "head.weight": weight},
    )


@pytest.mark.parametrize(("carried", "is_marked"), [(0, True), (15, True), (16, False)])
def test_parameters_outside_units_may_be_reduced_by_hand(carried, is_marked):
    changes = compare_trees(tree(managed=True), tree(managed=False), carried_elements=carried)
    assert {change.breaks_training for change in changes} == {is_marked}
    assert any(change.what == "no longer managed by a unit" for change in changes)
