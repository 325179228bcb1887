"""Changes of resharding after forward are described in the terms of the API that sets it."""

import pytest

from pytest_fsdp_comm.text.words import itemsize
from pytest_fsdp_comm.tree.profile import UnitFacts, policy_change


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
    ("dtype", "nbytes"),
    [("float8_e4m3fn", 1), ("bool", 1), ("bfloat16+float32", 4), ("float32+bfloat16", 4)],
)
def test_precision_of_several_dtypes_counts_largest(dtype, nbytes):
    assert itemsize(dtype) == nbytes
