"""Kinds of steps that replace calls or reductions, each with changes that look similar."""

from dataclasses import replace

import pytest
from sample_profiles import (
    BACKWARD,
    DP,
    FORWARD,
    accumulated,
    changed,
    describe_steps,
    evaluated,
    made,
    profile,
    role,
    row,
    times,
    twice,
    unit,
)

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Evidence
from pytest_fsdp_comm.comm.explanation.states import replace_prefix

OUTSIDE = Phase.OUTSIDE


def metric(kind="all_reduce", nbytes=12, *, axis="dp", count=1, owner=None, phase=OUTSIDE):
    return row(phase, owner, kind, nbytes, axis=axis, count=count)


def with_rows(*rows):
    return made([*profile(tensor_parallel=True).rows, *rows])


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            metric(),
            metric(axis="tp"),
            "all_reduce[tp] instead of all_reduce[dp] outside forward and backward, same size",
        ),
        (
            metric(),
            metric(axis="tp", nbytes=16),
            "all_reduce[tp] instead of all_reduce[dp] outside forward and backward, 12 -> 16 B",
        ),
        (
            metric(),
            metric(axis="tp", count=2),
            "all_reduce[tp] instead of all_reduce[dp] outside forward and backward, 12 -> 24 B",
        ),
        (metric(), metric(axis="tp", phase=Phase.OPTIMIZER), None),
    ],
)
def test_call_over_another_axis_is_one_line(old, new, line):
    sentences = describe_steps(with_rows(old), with_rows(new))
    assert [text for text in sentences if " instead of " in text] == ([line] if line else [])


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (
            [metric("broadcast")],
            "broadcast instead of all_reduce over dp outside forward and backward, same size (an "
            "all_reduce sends about twice its size)",
        ),
        (
            [metric("reduce_scatter"), metric("all_gather")],
            "all_gather and reduce_scatter instead of all_reduce over dp outside forward and "
            "backward, 12 -> 24 B",
        ),
        # The all-reduce is still there; the new call is in another phase, or of a module.
        ([metric(), metric("broadcast")], None),
        ([metric("broadcast", phase=Phase.OPTIMIZER)], None),
        ([metric("broadcast", owner="head")], None),
    ],
)
def test_other_kind_of_call_is_one_line(new, line):
    sentences = describe_steps(with_rows(metric()), with_rows(*new))
    assert [text for text in sentences if " instead of " in text] == ([line] if line else [])


def test_calls_over_several_axes_may_be_replaced():
    """For example, sums within and between nodes by one sum over all ranks."""
    nested = [metric("reduce_scatter"), metric(axis="tp"), metric("all_gather")]
    (line,) = describe_steps(with_rows(*nested), with_rows(metric(axis="world")))
    assert line == (
        "all_reduce[world] instead of all_gather[dp], all_reduce[tp] and reduce_scatter[dp] "
        "outside forward and backward, 36 -> 12 B"
    )
    # A call that remains was not replaced.
    (line,) = describe_steps(with_rows(*nested), with_rows(nested[1], metric(axis="world")))
    assert "all_reduce[tp]" not in line


def test_objects_instead_of_tensors_are_named():
    objects = metric("all_gather")
    objects = replace(objects, calls=(replace(objects.calls[0], nbytes=0, is_object=True),))
    (line,) = describe_steps(with_rows(metric()), with_rows(objects))
    assert (
        line == "all_gather of objects instead of all_reduce over dp outside forward and backward"
    )


GRADIENTS = [row(BACKWARD, name, "all_reduce", 64, "gradients") for name in ("a", "b", "c")]
PASS = row(FORWARD, "a", "all_gather", 8, "activations", axis="tp")


@pytest.mark.parametrize(
    ("flat", "is_flattened"),
    [
        (metric(nbytes=192), True),
        # Another size, another axis, fewer bytes than the gradients have, or a parameter's role.
        (metric(nbytes=190), False),
        (metric(nbytes=192, axis="tp"), False),
        (metric(nbytes=64), False),
        (row(OUTSIDE, None, "all_reduce", 192, "parameters"), False),
    ],
)
def test_flat_buffer_reduces_the_gradients(flat, is_flattened):
    old, new = made([PASS, *GRADIENTS]), made([PASS, flat])
    comparison = compare(old, new)
    line = "gradients of a, b, c no longer have calls of their own: 3 -> 1 call of all_reduce[dp]"
    assert any(text.startswith(line) for text in comparison.sentences) == is_flattened
    assert bool(comparison.training) != is_flattened
    back = [
        "gradients of a, b, c now have calls of their own: 1 -> 3 calls of all_reduce[dp], same "
        "bytes in total"
    ] * is_flattened
    assert [text for text in compare(new, old).sentences if "calls of their own" in text] == back


def test_hooks_of_several_backwards_multiply_the_bytes():
    hooks = made([PASS, *(times(entry, 3) for entry in GRADIENTS)])
    (line,) = compare(made([PASS, metric(nbytes=192)]), hooks).sentences
    assert line.endswith("calls of their own: 1 -> 9 calls of all_reduce[dp], 3 times the bytes")


def causes(old, new, trees=None):
    return "; ".join(cause.text for cause in compare(old, new, trees).causes)


def rolled_out(old, forwards, steps):
    """Forwards without a backward, then steps."""

    def change(one):
        return times(one, forwards + steps if one.phase is FORWARD else steps)

    return changed(old, change)


def test_more_steps_beside_rollouts_are_named():
    old = changed(profile(), lambda one: None if one.owner == "" else one)
    new = rolled_out(old, 1, 3)
    comparison = compare(rolled_out(old, 1, 1), new)
    assert comparison.sentences == ("all backward calls: 3 times as many, and 2 more forwards",)
    assert "beside as many forwards without a backward" in causes(rolled_out(old, 1, 1), new)
    for other in (twice(old), accumulated(old), evaluated(old)):
        assert "beside as many forwards" not in causes(old, other)


def test_smaller_axis_reduces_over_fewer_ranks():
    """The rows are equal; only the mesh shows it."""
    half = replace(DP, size=2, dims=((2, 4),))
    old = profile()
    new = replace(old, mesh_axes=(half,))
    line = "gradients of (root), layers.{0..2} are reduced over 2 ranks instead of 4: 4 calls"
    assert compare(old, new).sentences[0].startswith(line)
    assert compare(new, old).training == ()
    other_world = replace(new, world_size=4)
    assert compare(old, other_world).training == ()


TREES = Evidence(units=frozenset(), policies={}, trainable=frozenset({"layers.1.norm", "head"}))
NORM = row(BACKWARD, "layers.1.norm", "all_reduce", 64, "gradients")


@pytest.mark.parametrize(
    ("norm", "trees", "is_named"),
    [
        (NORM, TREES, True),
        # Without trees, FSDP may ignore the norm; over another axis, nobody else reduces it.
        (NORM, None, False),
        (NORM, replace(TREES, unmanaged=frozenset({"layers.1.norm"})), False),
        (replace(NORM, axis="tp"), TREES, False),
    ],
)
def test_gradients_reduced_again_below_a_unit_are_named(norm, trees, is_named):
    comparison = compare(profile(), made([*profile().rows, norm]), trees)
    text = "gradients of layers.1.norm are reduced twice over dp: by FSDP, and by 1 call, 64 B per"
    lines = comparison.sentences[: len(comparison.training)]
    assert any(line.startswith(text) for line in lines) == is_named


def without_reductions(rows):
    return [one for one in rows if role(one) != "gradients"]


@pytest.mark.parametrize(
    ("head", "trees", "is_named"),
    [
        (without_reductions(unit("head", 64)), TREES, True),
        (unit("head", 64), TREES, False),
        # A teacher runs without a backward; frozen parameters have no gradients.
        ([one for one in unit("head", 64) if one.phase is FORWARD], TREES, False),
        (without_reductions(unit("head", 64)), replace(TREES, trainable=frozenset()), False),
        (without_reductions(unit("head", 64)), None, False),
    ],
)
def test_new_unit_without_reductions_is_named(head, trees, is_named):
    comparison = compare(profile(), made([*profile().rows, *head]), trees)
    lines = comparison.sentences[: len(comparison.training)]
    assert ("gradients of head are not reduced over dp" in lines) == is_named


def inputs_of(*owners, forward=1):
    rows = []
    for owner in owners:
        rows += [row(FORWARD, owner, "all_reduce", 32, "activations", axis="tp", count=forward)]
        rows += [row(BACKWARD, owner, "all_reduce", 32, "activations", axis="tp")]
    return rows


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        (lambda one: None if one.phase is BACKWARD and one.owner == "mlp" else one, True),
        # The module is gone; its forward changed too; nothing below it is trained.
        (lambda one: None if one.owner == "mlp" else one, False),
        (
            lambda one: (
                (None if one.phase is BACKWARD else replace(one, what="all_gather"))
                if one.owner == "mlp"
                else one
            ),
            False,
        ),
        (
            lambda one: None if one.phase is BACKWARD and one.owner in {"mlp", "layers.0"} else one,
            False,
        ),
    ],
)
def test_lost_reduction_of_input_gradients_is_named(change, is_named):
    old = made([*profile().rows, *inputs_of("mlp", "attention")])
    comparison = compare(old, changed(old, change))
    line = "gradients of the inputs of mlp are no longer reduced over tp in backward"
    assert (line in comparison.sentences[: len(comparison.training)]) == is_named


@pytest.mark.parametrize(
    ("fqn", "old", "new", "renamed"),
    [
        ("layers.3.mlp", "layers.*", "model.blocks.*", "model.blocks.3.mlp"),
        ("layers.a.mlp", "layers.*", "blocks.*", "layers.a.mlp"),
        ("a.0+a.1", "a.*", "b.*", "b.0+b.1"),
        ("layers", "layers.*", "blocks.*", "layers"),
        ("head", "", "model", "model.head"),
    ],
)
def test_prefix_of_whole_segments_is_replaced(fqn, old, new, renamed):
    assert replace_prefix(fqn, old, new) == renamed
