"""`differs` finds the same differences as an explanation, without its cost."""

from dataclasses import replace

import pytest
from sample_profiles import counted, profile, twice

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import (
    GatheredPeak,
    remove_activation_sizes,
    remove_async,
    remove_overlap,
    replace_fields,
    restrict,
    sort_rows,
)
from pytest_fsdp_comm.snapshots.documents import SnapshotText, differs


def with_overlap(one):
    """Return the profile of simulated ranks, with exposed calls and a host wait."""
    rows = [
        replace(row, calls=replace_fields(row.calls, exposed=row.subject == "collective"))
        for row in one.rows
    ]
    wait = counted("host_wait", Phase.FORWARD, "layers.0", "item")
    return replace(one, rows=sort_rows([*rows, wait]), shows_overlap=True)


SAME = {
    "versions": lambda one: replace(one, torch_version="9.9", backend="other"),
    "some of the ranks": lambda one: restrict(one, range(1)),
    "async unknown": remove_async,
    "overlap known": lambda one: replace(one, shows_overlap=True),
    "overlap": with_overlap,
}
OTHER = {
    "counts": twice,
    "activation sizes": remove_activation_sizes,
    "world size": lambda one: replace(one, world_size=one.world_size + 1),
    "peak": lambda one: replace(one, peaks=(GatheredPeak(nbytes=64),)),
}


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_differs_agrees_with_the_comparison(what):
    old = profile()
    new = (SAME | OTHER)[what](old)
    texts = [SnapshotText.from_profile(one, where="x") for one in (old, new)]
    assert differs(*texts) == (what in OTHER)
    assert bool(compare(old, new).changes) == (what in OTHER)


def test_overlap_is_compared_if_both_sides_show_it():
    bare, full = replace(profile(), shows_overlap=True), with_overlap(profile())
    assert differs(*(SnapshotText.from_profile(one, where="x") for one in (bare, full)))
    subjects = {change.subject for change in compare(bare, full).changes}
    assert subjects == {"collective", "host_wait"}
    texts = [SnapshotText.from_profile(remove_overlap(one), where="x") for one in (bare, full)]
    assert not differs(*texts)
