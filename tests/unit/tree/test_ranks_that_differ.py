"""Comparisons of trees that differ between ranks."""

from dataclasses import replace

import pytest

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.reports.changes import render_tree_changes
from pytest_fsdp_comm.tree.diff import compare
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, UnitFacts, merge

MESH = (MeshAxis(name="dp", size=2, dims=((2, 1),)),)


def tree(*layers, axes=MESH, policy=True, dtype="float32"):
    names = [f"layers.{number}" for number in layers]
    return TreeFacts(
        world_size=4,
        mesh_axes=axes,
        units={1: {name: UnitFacts(kind="fsdp2", reshard_after_forward=policy) for name in names}},
        parameters={f"{name}.weight": ParameterFacts(shape=(4,), dtype=dtype) for name in names},
    )


def profile(*trees):
    return merge(dict(enumerate(trees)))


def irregular(*groups):
    """A mesh of which each rank knows the group that it is in."""

    def axes(rank):
        group = next(group for group in groups if rank in group)
        return (MeshAxis(name="ep", size=2, groups=(group,)),)

    return [tree(0, axes=axes(rank)) for rank in range(4)]


FIRST, SECOND = tree(0), tree(1)
STAGES = (FIRST, FIRST, SECOND, SECOND)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (STAGES, STAGES, []),
        # The same axis over other ranks, which no tree of one rank shows.
        (
            irregular((0, 1), (2, 3)),
            irregular((0, 3), (1, 2)),
            ["mesh: ep=2 ranks 0-1 | 2-3 -> ep=2 ranks 0,3 | 1-2"],
        ),
        (
            STAGES,
            (FIRST, FIRST, tree(1, policy=False), tree(1, policy=False)),
            ["layers.1: reshard_after_forward True -> False, on ranks 2-3"],
        ),
        # A layer of the second stage moved to the first, or became part of both.
        (
            (FIRST, FIRST, tree(1, 2), tree(1, 2)),
            (tree(0, 1), tree(0, 1), tree(2), tree(2)),
            ["layers.1.weight: moved from ranks 2-3 to ranks 0-1"],
        ),
        (
            (FIRST, FIRST, tree(1, 2), tree(1, 2)),
            (tree(0, 1), tree(0, 1), tree(1, 2), tree(1, 2)),
            ["layers.1.weight: added, a plain tensor, on ranks 0-1"],
        ),
        # Changes of all ranks name no ranks.
        (
            (FIRST, FIRST, replace(FIRST, units={}), FIRST),
            (tree(0, dtype="bfloat16"),) * 2
            + (replace(tree(0, dtype="bfloat16"), units={}), tree(0, dtype="bfloat16")),
            ["layers.0.weight: dtype float32 -> bfloat16"],
        ),
        # Ranks whose trees were equal and now differ.
        (
            (FIRST,) * 4,
            (FIRST, FIRST, FIRST, tree(0, policy=False)),
            ["layers.0: reshard_after_forward True -> False, on rank 3"],
        ),
        # So do parameters, which is worse than a policy that all units changed.
        (
            (FIRST,) * 4,
            (tree(0, policy=False),) * 3 + (tree(0, policy=False, dtype="bfloat16"),),
            [
                "layers.0.weight: differs between ranks now",
                "layers.0: reshard_after_forward True -> False",
                "layers.0.weight: dtype float32 -> bfloat16, on rank 3",
            ],
        ),
        (
            STAGES,
            [replace(one, world_size=8) for one in STAGES * 2],
            ["world_size: 4 -> 8"],
        ),
    ],
)
def test_each_change_says_which_ranks_have_it(old, new, told):
    found = compare(profile(*old), profile(*new))
    assert [str(change) for change in found] == told


@pytest.mark.parametrize(
    ("parameter", "unit", "line"),
    [
        ({"managed": False}, {}, "layers.0.weight: no longer managed by a unit"),
        ({}, {"gradient_divide_factor": 2.0}, "layers.0: gradient_divide_factor None -> 2.0"),
        ({"trainable": False}, {"offload": True}, ""),
    ],
)
def test_change_that_breaks_training_comes_first(parameter, unit, line):
    old = tree(0, 1)
    facts, policy = old.parameters["layers.0.weight"], old.units[1]["layers.0"]
    new = replace(
        old,
        units={1: {"layers.0": replace(policy, **unit), "layers.1": replace(policy, offload=True)}},
        parameters=old.parameters | {"layers.0.weight": replace(facts, **parameter)},
    )
    text = render_tree_changes(compare(profile(old), profile(new)), snapshot="s")
    assert [one.text for one in text.select("breaks training")] == [line] * bool(line)
    assert "shards move to host memory" in text.select("change")[0].text


@pytest.mark.parametrize(
    ("was_trained", "lines"),
    [
        (False, ["frozen, and no longer managed by a unit"]),
        (True, ["trainable -> frozen", "no longer managed by a unit"]),
    ],
)
def test_parameter_that_leaves_its_unit_was_frozen(was_trained, lines):
    both = tree(0)
    facts = replace(both.parameters["layers.0.weight"], trainable=was_trained)
    old, new = (
        replace(both, parameters={"layers.0.weight": side})
        for side in (facts, replace(facts, trainable=False, managed=False))
    )
    expected = [f"layers.0.weight: {line}" for line in lines]
    assert sorted(str(change) for change in compare(profile(old), profile(new))) == sorted(expected)


@pytest.mark.parametrize(
    ("before", "after", "has_units", "line"),
    [
        (None, {"managed": False}, True, "added, trained, but no unit manages it or reduces its "),
        (
            {"managed": False, "trainable": False},
            {"managed": False},
            True,
            "now trained, but no unit manages it or reduces its ",
        ),
        # In a unit, frozen, on a mesh without FSDP, in a model without FSDP, and as it was.
        (None, {}, True, ""),
        (None, {"managed": False, "trainable": False}, True, ""),
        (None, {"managed": False, "placements": (("tp", "Shard(0)"),)}, True, ""),
        (None, {"managed": False}, False, ""),
        ({"managed": False}, {"managed": False, "shape": (8,)}, True, ""),
    ],
)
def test_trained_parameter_in_no_unit_comes_first(before, after, has_units, line):
    old = tree(0) if has_units else replace(tree(0), units={})
    sides = []
    for facts in (before, after):
        parameters = dict(old.parameters)
        if facts is not None:
            parameters["layers.0.lora"] = ParameterFacts(**{"shape": (4,), "dtype": "x"} | facts)
        sides.append(profile(replace(old, parameters=parameters)))
    text = render_tree_changes(compare(*sides), snapshot="s")
    training = [one.text for one in text.select("breaks training")]
    assert training == [f"layers.0.lora: {line}gradients"] * bool(line)
    assert text.changes
