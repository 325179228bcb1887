"""`differs` finds the same differences as an explanation, without its cost."""

from dataclasses import replace

import pytest
from sample_profiles import profile, twice

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.profile import (
    GatheredPeak,
    restrict,
    without_activation_sizes,
    without_async,
)
from pytest_fsdp_comm.snapshots.documents import SnapshotText, differs

SAME = {
    "versions": lambda one: replace(one, torch_version="9.9", backend="other"),
    "some of the ranks": lambda one: restrict(one, range(1)),
    "async unknown": without_async,
}
OTHER = {
    "counts": twice,
    "activation sizes": without_activation_sizes,
    "world size": lambda one: replace(one, world_size=one.world_size + 1),
    "peak": lambda one: replace(one, peaks=(GatheredPeak(nbytes=64),)),
}


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_differs_agrees_with_the_comparison(what):
    old = profile()
    new = (SAME | OTHER)[what](old)
    texts = [SnapshotText.of(one, where="x") for one in (old, new)]
    assert differs(*texts) == (what in OTHER)
    assert bool(compare(old, new).changes) == (what in OTHER)
