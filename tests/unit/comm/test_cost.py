"""Calls and bytes of a change, by kind and axis, with numbers derived by hand."""

import itertools
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Cost, Volume, cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, GatheredPeak, Row


def row(what, *nbytes, ranks=(), objects=0, owner="a"):
    """One row of calls with some sizes; `what` as in ``all_gather[dp]``."""
    kind, axis = what.rstrip("]").split("[")
    calls = [Calls(count=n, nbytes=size) for size, n in sorted(Counter(nbytes).items())]
    calls += [Calls(count=objects, is_object=True)] if objects else []
    return Row(
        phase=Phase.FORWARD, owner=owner, what=kind, axis=axis, calls=tuple(calls), ranks=ranks
    )


def profile(*rows, dp=4, peaks=(), **changes):
    axes = (MeshAxis(name="dp", size=dp), MeshAxis(name="tp", size=2))
    values = {"world_size": 8, "mesh_axes": axes, **changes}
    return CommProfile(rows=rows, peaks=peaks, **values)


def by_kind(cost):
    """Calls and bytes of both sides."""
    return {
        f"{one.kind}[{one.axis}]": (
            (one.before.count, one.before.nbytes),
            (one.after.count, one.after.nbytes),
        )
        for one in cost.collectives
    }


def test_a_reduction_for_each_of_four_micro_batches():
    """3 units of 512 B: gathered 5 times in each micro-batch, reduced once, then 4 times."""
    gathers = row("all_gather[dp]", *[512] * 20)
    cost = cost_of_change(
        profile(gathers, row("reduce_scatter[dp]", *[512] * 3)),
        profile(gathers, row("reduce_scatter[dp]", *[512] * 12)),
    )
    assert by_kind(cost) == {
        "all_gather[dp]": ((20, 10_240), (20, 10_240)),
        "reduce_scatter[dp]": ((3, 1_536), (12, 6_144)),
    }
    (dp,) = cost.axes
    assert (dp.before, dp.after) == (cost.before, cost.after)
    assert (cost.before.count, cost.before.nbytes) == (23, 11_776)
    assert (cost.after.count, cost.after.nbytes) == (32, 16_384)
    assert cost.ranks == ()


def test_axes_add_up_to_the_whole():
    """HSDP: what is reduced over 4 shards is reduced again over 2 replicas, a quarter each."""
    old = profile(
        row("all_gather[dp]", 1000, 1000),
        row("reduce_scatter[dp]", 1000),
        row("all_reduce[tp]", 250),
    )
    new = profile(
        row("all_gather[dp]", 1000),
        row("reduce_scatter[dp]", 1000, 1000),
        row("all_reduce[tp]", 250, 250),
    )
    cost = cost_of_change(old, new)
    assert [(one.axis, one.before.nbytes, one.after.nbytes) for one in cost.axes] == [
        ("dp", 3000, 3000),
        ("tp", 250, 500),
    ]
    assert (cost.before.nbytes, cost.after.nbytes) == (3250, 3500)


def test_objects_are_counted_apart():
    old = profile(row("all_gather[dp]", 8, objects=1))
    new = profile(row("all_gather[dp]", 8, objects=3))
    cost = cost_of_change(old, new)
    assert cost.before == Volume(count=1, nbytes=8, unsized=1)
    assert cost.after == Volume(count=1, nbytes=8, unsized=3)


def test_cost_is_of_the_rank_that_changes_most():
    """Stages of a pipeline: rank 0 has most, before and after, but not what changes."""
    first = row("all_gather[dp]", 900, ranks=(0,))
    second = row("all_gather[dp]", 100, ranks=(1, 2))
    third = row("all_gather[dp]", 100, ranks=(3,))
    changed = row("all_gather[dp]", 500, ranks=(1, 2))
    less = row("all_gather[dp]", 50, ranks=(3,))
    common = row("all_reduce[tp]", 8)
    cost = cost_of_change(
        profile(first, second, third, common, world_size=4),
        profile(first, changed, less, common, world_size=4),
    )
    assert cost.ranks == (1, 2)
    assert by_kind(cost) == {
        "all_gather[dp]": ((1, 100), (1, 500)),
        "all_reduce[tp]": ((1, 8), (1, 8)),
    }


def test_ranks_with_equal_sums_have_one_cost():
    split = profile(
        row("all_gather[dp]", 8, owner="a", ranks=(0,)),
        row("all_gather[dp]", 8, owner="b", ranks=(1,)),
        world_size=2,
    )
    assert cost_of_change(split, split).ranks == ()


def test_where_bytes_are_equal_calls_decide():
    old = profile(row("all_gather[dp]", 8), world_size=2)
    new = profile(
        row("all_gather[dp]", 8, ranks=(0,)),
        row("all_gather[dp]", 4, 4, ranks=(1,)),
        world_size=2,
    )
    assert cost_of_change(old, new).ranks == (1,)


def test_only_ranks_of_both_sides_are_compared():
    old = profile(
        row("all_gather[dp]", 8, ranks=(0,)), row("all_gather[dp]", 16, ranks=(1, 2)), world_size=3
    )
    new = profile(row("all_gather[dp]", 16), recorded_ranks=(1,))
    assert by_kind(cost_of_change(old, new)) == {"all_gather[dp]": ((1, 16), (1, 16))}
    others = profile(row("all_gather[dp]", 16), recorded_ranks=(5,))
    assert cost_of_change(new, others) == Cost()


def test_peak_is_of_the_rank_that_changes_most():
    old = profile(peaks=(GatheredPeak(nbytes=90, ranks=(0,)), GatheredPeak(nbytes=10, ranks=(1,))))
    new = profile(peaks=(GatheredPeak(nbytes=90, ranks=(0,)), GatheredPeak(nbytes=40, ranks=(1,))))
    cost = cost_of_change(old, new)
    assert (cost.peak_before, cost.peak_after, cost.peak_ranks) == (10, 40, (1,))
    same = cost_of_change(old, old)
    assert (same.peak_before, same.peak_after, same.peak_ranks) == (90, 90, (0,))
    none = cost_of_change(profile(), profile(peaks=(GatheredPeak(nbytes=4),)))
    assert (none.peak_before, none.peak_after, none.peak_ranks) == (0, 4, ())


RANKS = tuple(
    ranks for size in range(4) for ranks in itertools.combinations(range(4), size) if size < 4
)
ROWS = st.lists(
    st.builds(
        lambda what, sizes, ranks, objects: row(what, *sizes, ranks=ranks, objects=objects),
        st.sampled_from(["all_gather[dp]", "reduce_scatter[dp]", "all_reduce[tp]"]),
        st.lists(st.sampled_from([8, 64, 1000]), min_size=1, max_size=3),
        st.sampled_from(RANKS),
        st.integers(0, 1),
    ),
    max_size=6,
)


def naive(rows, rank):
    """Calls and bytes of one rank, row by row."""
    sums = Counter()
    for each in rows:
        if not each.ranks or rank in each.ranks:
            for calls in each.calls:
                if not calls.is_object:
                    sums["count"] += calls.count
                    sums["nbytes"] += calls.count * calls.nbytes
                    sums[each.what] += calls.count * calls.nbytes
    return sums


@given(ROWS, ROWS)
def test_cost_is_the_largest_change_of_a_rank(before, after):
    cost = cost_of_change(profile(*before, world_size=4), profile(*after, world_size=4))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    sums = {rank: (naive(before, rank), naive(after, rank)) for rank in range(4)}
    changes = {
        rank: sum(abs(now[kind] - was[kind]) for kind in kinds) for rank, (was, now) in sums.items()
    }
    for rank in cost.ranks or range(4):
        assert changes[rank] == max(changes.values())
        for volume, side in zip((cost.before, cost.after), sums[rank], strict=True):
            assert (volume.count, volume.nbytes) == (side["count"], side["nbytes"])


def test_cost_is_linear_in_distinct_ranks():
    def timed_cost(num_ranks):
        def sent(extra):
            return [
                row("all_to_all[dp]", 1000 + rank + extra, owner=f"layers.{layer}", ranks=(rank,))
                for layer in range(8)
                for rank in range(num_ranks)
            ]

        common = [row("all_gather[dp]", 8, owner=f"layers.{layer}") for layer in range(32)]
        old, new = (profile(*common, *sent(extra), world_size=num_ranks) for extra in (0, 1))
        start = time.process_time()
        cost = cost_of_change(old, new)
        return cost, time.process_time() - start

    _, base_s = timed_cost(512)
    cost, took_s = timed_cost(8 * 512)
    assert took_s < 4 * 8 * base_s  # a quadratic algorithm needs 64 times as long
    # Each rank sends 8 bytes more; the last one sends most.
    assert cost.ranks == (4095,)
    assert cost.after.nbytes - cost.before.nbytes == 8
