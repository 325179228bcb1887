"""The lines of a failure about the cost of a change."""

import pytest

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, GatheredPeak, Row
from pytest_fsdp_comm.reports.cost_lines import cost_lines

MIB = 1024**2


def gather(*calls, axis="dp", **changes):
    return row("all_gather", axis, *calls, **changes)


def scatter(*calls, axis="dp"):
    return row("reduce_scatter", axis, *calls)


def reduce(*calls, axis="tp"):
    return row("all_reduce", axis, *calls)


def row(kind, axis, *calls, ranks=(), objects=0):
    """Return calls of one kind over one axis, from pairs of count and size."""
    made = [Calls(count=count, nbytes=nbytes) for count, nbytes in calls]
    made += [Calls(count=objects, is_object=True)] if objects else []
    return Row(phase=Phase.FORWARD, owner="a", what=kind, axis=axis, calls=tuple(made), ranks=ranks)


def lines(before, after, *, peaks=(0, 0), width=1000, **changes):
    """The lines of two profiles.

    Args:
        before: Rows.
        after: Rows.
        peaks: Bytes, or the bytes of each rank.
        width: As of `cost_lines`.
        changes: Of both profiles.
    """

    def profile(rows, peak):
        axes = (MeshAxis(name="dp", size=4), MeshAxis(name="tp", size=2))
        by_rank = peak.items() if isinstance(peak, dict) else [((), peak)] if peak else []
        held = tuple(GatheredPeak(nbytes=nbytes, ranks=ranks) for ranks, nbytes in by_rank)
        values = {"world_size": 4, "mesh_axes": axes, **changes}
        return CommProfile(rows=tuple(rows), peaks=held, **values)

    sides = map(profile, (before, after), peaks)
    return list(cost_lines(cost_of_change(*sides), width=width))


def test_cost_of_one_kind_is_one_line_with_total():
    before = [gather((10, 146_800)), scatter((10, 146_800))]
    assert lines(before, [gather((16, 150_732)), before[1]], peaks=(600, 600)) == [
        "+64 % bytes in all_gather[dp] (1.4 -> 2.3 MiB per rank), +32 % in all, peak "
        "gathered unchanged"
    ]
    # If there is only one kind, the total is not repeated.
    assert lines([gather((1, 8))], [gather((2, 8))]) == [
        "+100 % bytes in all_gather[dp] (8 -> 16 B per rank)"
    ]


def test_cost_names_axis_unless_implied():
    others = [scatter((1, 100)), reduce((1, 200))]
    assert lines([gather((1, 100)), *others], [gather((2, 100)), *others]) == [
        "+100 % bytes in all_gather[dp] (100 -> 200 B per rank), +50 % on dp, +25 % in all"
    ]
    assert lines([gather((1, 100)), others[1]], [gather((2, 100)), others[1]]) == [
        "+100 % bytes in all_gather[dp] (100 -> 200 B per rank), +33 % in all"
    ]


def test_cost_of_several_kinds_largest_first():
    """HSDP: one more gather and reduction, which is reduced again."""
    assert lines(
        [gather((2, MIB)), scatter((1, MIB)), reduce((2, MIB))],
        [gather((3, MIB)), scatter((3, MIB)), reduce((3, MIB // 2))],
        peaks=(MIB, MIB),
    ) == [
        "+50 % bytes in all (5.0 -> 7.5 MiB per rank), +100 % on dp, peak gathered unchanged",
        "reduce_scatter[dp] x3.0 (1.0 -> 3.0 MiB), all_gather[dp] +50 % (2.0 -> 3.0 MiB), "
        "all_reduce[tp] -25 % (2.0 -> 1.5 MiB in 2 -> 3 calls)",
    ]


def test_more_and_smaller_calls_are_counted():
    """One norm of all parameters, then one of each."""
    rest = [gather((1, MIB)), scatter((1, 64))]
    old, new = [reduce((1, 120)), *rest], [reduce((22, 4)), *rest]
    assert lines(old, new) == [
        "-27 % bytes in all_reduce[tp] (120 -> 88 B in 1 -> 22 calls per rank), about as "
        "many in all"
    ]
    # Among calls with as many bytes.
    assert lines(old, [new[0], rest[0], scatter((16, 4))])[1:] == [
        "reduce_scatter[dp] 1 -> 16 calls"
    ]
    whole, parts = lines(old, [*new, row("broadcast", "dp", (1, 8))])
    assert whole.startswith("about as many bytes in all (1_048_760 -> 1_048_736 B in 3 -> 25 calls")
    assert parts.startswith(
        "all_reduce[tp] -27 % (120 -> 88 B in 1 -> 22 calls), broadcast[dp] new"
    )
    # Fewer calls of more bytes.
    assert lines(new, old)[0].startswith("+36 % bytes in all_reduce[tp] (88 -> 120 B per rank")


def test_kinds_beyond_a_line_are_counted():
    kinds = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "recv"]
    before = [row(kind, "dp", (1, 8)) for kind in kinds]
    after = [row(kind, "dp", (n, 8)) for n, kind in enumerate(kinds, start=2)]
    assert lines(before, after, width=80)[1:] == [
        "recv[dp] x7.0 (8 -> 56 B), send[dp] x6.0 (8 -> 48 B), and 4 more kinds"
    ]
    assert lines(before, after, width=10)[1:] == ["recv[dp] x7.0 (8 -> 56 B), and 5 more kinds"]
    assert lines(before, after)[1].endswith(", all_gather[dp] +100 % (8 -> 16 B)")


def test_what_grows_alike_is_one_line():
    before = [gather((5, 512)), scatter((3, 512)), reduce((1, 64))]
    after = [gather((20, 512)), scatter((12, 512)), reduce((1, 256))]
    assert lines(before, after) == [
        "x4.0 bytes in all (4.1 -> 16.2 KiB per rank), each kind by the same factor"
    ]
    almost = lines(before, [*after[:2], reduce((1, 255))])
    assert almost[0] == "x4.0 bytes in all (4.1 -> 16.2 KiB per rank), x4.0 on dp"
    assert almost[1].endswith("all_reduce[tp] x4.0 (64 -> 255 B)")


def test_cost_percentage_of_new_and_removed_kinds():
    rest = gather((1, MIB))
    assert lines([rest], [rest, reduce((1, MIB))]) == [
        "new bytes in all_reduce[tp] (0 -> 1.0 MiB per rank), +100 % in all"
    ]
    assert lines([rest, reduce((1, MIB))], [rest]) == [
        "-100 % bytes in all_reduce[tp] (1.0 MiB -> 0 B per rank), -50 % in all"
    ]
    assert lines([], [rest, reduce((1, 8))]) == [
        "new bytes in all (0 -> 1.0 MiB per rank)",
        "all_gather[dp] new (0 -> 1.0 MiB), all_reduce[tp] new (0 -> 8 B)",
    ]
    assert lines([], [rest]) == ["new bytes in all_gather[dp] (0 -> 1.0 MiB per rank)"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            [gather((1, 64))],
            [gather((64, 1))],
            ["bytes unchanged, 63 calls more in all_gather[dp] (1 -> 64 per rank)"],
        ),
        (
            [gather((2, 32))],
            [gather((1, 64))],
            ["bytes unchanged, 1 call fewer in all_gather[dp] (2 -> 1 per rank)"],
        ),
        (
            [gather((1, 64)), scatter((1, 64))],
            [gather((8, 8)), scatter((4, 16))],
            [
                "bytes unchanged, 10 calls more in all (2 -> 12 per rank)",
                "all_gather[dp] 1 -> 8 calls, reduce_scatter[dp] 1 -> 4 calls",
            ],
        ),
        (
            [gather((1, 64)), scatter((2, 32))],
            [gather((2, 32)), scatter((1, 64))],
            [
                "bytes unchanged, calls unchanged in all (3 per rank)",
                "all_gather[dp] 1 -> 2 calls, reduce_scatter[dp] 2 -> 1 calls",
            ],
        ),
        # No bytes that could have changed.
        (
            [],
            [row("barrier", "dp", (3, 0))],
            ["3 calls more in barrier[dp] (0 -> 3 per rank)"],
        ),
    ],
)
def test_where_bytes_are_equal_calls_are_counted(before, after, expected):
    assert lines(before, after) == expected


def test_peak_is_printed_if_changed_or_more_gathers():
    one, two = [gather((1, MIB)), reduce((1, MIB))], [gather((2, MIB)), reduce((1, MIB))]
    assert lines(one, one, peaks=(MIB, 3 * MIB)) == [
        "bytes unchanged, peak gathered x3.0 (1.0 -> 3.0 MiB per rank)"
    ]
    assert lines(two, one, peaks=(MIB, 2 * MIB)) == [
        "-50 % bytes in all_gather[dp] (2.0 -> 1.0 MiB per rank), -33 % in all, peak "
        "gathered +100 % (1.0 -> 2.0 MiB per rank)"
    ]
    # Nothing that is gathered changed.
    (line,) = lines(one, [one[0], reduce((2, MIB))], peaks=(MIB, MIB))
    assert "peak" not in line
    (line,) = lines(one, two)
    assert "peak" not in line
    assert lines(one, one, peaks=(0, MIB)) == [
        "bytes unchanged, peak gathered (0 -> 1.0 MiB per rank)"
    ]
    assert lines(one, one, peaks=({(0, 1): 5, (2, 3): 8}, {(0, 1): 5, (2, 3): 9})) == [
        "bytes unchanged, peak gathered +12 % (8 -> 9 B on ranks 2-3)"
    ]


def test_cost_excludes_calls_of_unknown_size():
    assert lines([gather((1, 8), objects=1)], [gather((1, 8), objects=3)]) == [
        "calls of unknown size 1 -> 3 per rank (not included)"
    ]
    assert lines([gather((1, 8), objects=1)], [gather((2, 8), objects=3)]) == [
        "+100 % bytes in all_gather[dp] (8 -> 16 B per rank), calls of unknown size "
        "1 -> 3 (not included)"
    ]
    assert lines([gather((1, 8), objects=1)], [gather((2, 8), objects=1)]) == [
        "+100 % bytes in all_gather[dp] (8 -> 16 B per rank), calls of unknown size not included"
    ]
    assert lines([gather((2, 64))], [gather(objects=2)]) == [
        "bytes in all_gather[dp]: 128 B -> 2 of unknown size per rank, calls of unknown size "
        "0 -> 2 (not included)"
    ]
    # They may send more than the others save.
    lost = row("all_reduce", "dp", (1, 8))
    kept = row("broadcast", "dp", (1, 92))
    assert lines([lost, kept], [gather(objects=2), kept])[0] == (
        "-100 % bytes in all_reduce[dp] (8 -> 0 B per rank), -8.0 % in all calls of known "
        "size, calls of unknown size 0 -> 2 (not included)"
    )


def test_cost_names_ranks_if_they_differ():
    same = gather((1, 900), ranks=(0,))
    old, new = gather((1, 100), ranks=(1, 2, 3)), gather((2, 100), ranks=(1, 2, 3))
    assert lines([same, old], [same, new]) == [
        "+100 % bytes in all_gather[dp] (100 -> 200 B on ranks 1-3, the largest change)"
    ]
    # All ranks send 100 bytes more, but some send more in all.
    others = gather((1, 8), ranks=(0,), axis="tp")
    assert lines([gather((1, 100)), others], [gather((2, 100)), others])[0].startswith(
        "+100 % bytes in all_gather[dp] (100 -> 200 B on rank 0)"
    )
    odd = tuple(range(1, 64, 2))
    (line,) = lines(
        [gather((1, 100))],
        [gather((2, 100), ranks=odd), gather((1, 100), ranks=tuple(range(0, 64, 2)))],
        world_size=64,
    )
    assert line.endswith("(100 -> 200 B on ranks 1-63/2, the largest change)")


def test_nothing_that_costs_is_no_line():
    same = [gather((1, 8), objects=1), reduce((1, 8))]
    assert lines(same, same, peaks=(MIB, MIB)) == []
    assert lines([], []) == []


def test_totals_are_one_line():
    others = [scatter((1, 100)), reduce((1, 200))]
    found = lines([gather((1, 100)), *others], [gather((2, 100)), *others], peaks=(8, 8), width=80)
    assert found == [
        "+100 % bytes in all_gather[dp] (100 -> 200 B per rank), +50 % on dp, +25 % in all, "
        "peak gathered unchanged",
    ]
