"""Changes of resharding after forward are described in the terms of the API that sets it."""

from dataclasses import replace

import pytest

from pytest_fsdp_comm.text.words import itemsize
from pytest_fsdp_comm.tree.diff import compare_trees
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, UnitFacts, policy_change


def unit(policy, kind="fsdp1", **changes):
    return UnitFacts(kind=kind, reshard_after_forward=policy, **changes)


FULL, GRAD_OP, NONE = True, False, None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (unit(FULL), unit(FULL), ""),
        (unit(FULL), unit(GRAD_OP), "sharding_strategy FULL_SHARD -> SHARD_GRAD_OP"),
        (unit(NONE), unit(FULL), "sharding_strategy NO_SHARD -> FULL_SHARD"),
        (
            unit(FULL, replicate_axis="dp"),
            unit(GRAD_OP, replicate_axis="dp"),
            "sharding_strategy HYBRID_SHARD -> _HYBRID_SHARD_ZERO2",
        ),
        (unit(FULL, "fsdp2"), unit(2, "fsdp2"), "reshard_after_forward True -> 2"),
    ],
)
def test_a_policy_is_told_in_the_words_of_its_api(old, new, told):
    assert policy_change(old, new) == told


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ((), ("layers.1",), ["forward_prefetch 0 units -> 1 unit"]),
        (("layers.1", "layers.2"), ("layers.1",), ["forward_prefetch 2 units -> 1 unit"]),
        (("layers.1",), ("layers.2",), ["forward_prefetch layers.1 -> layers.2"]),
        (("layers.1",), ("layers.1",), []),
    ],
)
def test_units_that_prefetch_more_can_share_a_line(old, new, told):
    facts = [
        TreeFacts(
            world_size=2,
            mesh_axes=(),
            units={1: {"layers.0": unit(FULL, "fsdp2", forward_prefetch=names)}},
            parameters={},
        )
        for names in (old, new)
    ]
    assert [change.what for change in compare_trees(*facts)] == told


def test_tied_parameter_is_not_removed():
    """Its other name still exists."""
    own = ParameterFacts(shape=(4, 4), dtype="float32")
    names = "head.weight", "embedding.weight"
    apart = dict.fromkeys(names, own)
    tied = {"head.weight": replace(own, tied=("embedding.weight",))}
    facts = [
        TreeFacts(world_size=2, mesh_axes=(), units={}, parameters=parameters)
        for parameters in (apart, tied)
    ]
    told = [(change.subject, change.what) for change in compare_trees(*facts)]
    assert told == [("head.weight", "not tied -> tied with embedding.weight")]
    told = [change.what for change in compare_trees(*reversed(facts))]
    assert told == ["tied with embedding.weight -> not tied"]
    # Both trees name the same parameter, but differently.
    renamed = {"embedding.weight": replace(own, tied=("head.weight",))}
    assert compare_trees(facts[1], replace(facts[1], parameters=renamed))


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float8_e4m3fn", 1), ("bool", 1), ("bfloat16+float32", 4), ("float32+bfloat16", 4)],
)
def test_precision_of_several_dtypes_counts_largest(dtype, nbytes):
    assert itemsize(dtype) == nbytes
