"""What differs between two profiles, why, and how it reads."""

import dataclasses
from collections import Counter

import pytest
from sample_profiles import counted

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Cost, cost_of_change
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    GatheredPeak,
    Row,
    Site,
    replace_fields,
    restrict,
    sort_rows,
)
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.reports.explanation import write_headline

KIB = 1024
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
LAYERS = tuple(f"layers.{number}" for number in range(4))


def row(phase, owner, kind, count=1, nbytes=KIB, *, calls=None, dtype="float32", **changes):
    """A row of calls of one size, which have some bytes together."""
    alike = Calls(count=count, nbytes=nbytes // count, dtype=dtype)
    return Row(phase=phase, owner=owner, what=kind, axis="dp", calls=calls or (alike,), **changes)


def profile(*rows, **changes):
    values = {"world_size": 4, "mesh_axes": (MeshAxis(name="dp", size=4),), **changes}
    return CommProfile(rows=sort_rows(rows), **values)


def step(*, forward=1, backward=1, reduces=1, owners=("", *LAYERS), nbytes=KIB, dtype="float32"):
    def rows_of(phase, kind, count, of):
        return [row(phase, owner, kind, count, count * nbytes, dtype=dtype) for owner in of]

    rows = rows_of(FORWARD, "all_gather", forward, owners)
    if backward:
        rows += rows_of(BACKWARD, "all_gather", backward, filter(None, owners))
    return rows + rows_of(BACKWARD, "reduce_scatter", reduces, owners)


def test_equal_profiles_have_no_changes():
    assert compare(profile(*step()), profile(*step())).changes == ()
    assert compare(profile(*step()), profile(*step())).causes == ()


def test_siblings_that_change_alike_are_one_change():
    (change,) = compare(profile(*step()), profile(*step(backward=0))).changes
    assert (change.phase, change.owners, change.what) == (BACKWARD, LAYERS, "all_gather[dp]")
    assert [(amount.count, amount.nbytes) for amount in change.before] == [(1, KIB)]
    assert change.after == ()


def test_world_mesh_and_reshards_are_compared():
    old = profile(
        counted("reshard", FORWARD, "a", "reshard"),
        counted("redistribution", FORWARD, "a", "x->y"),
    )
    new = dataclasses.replace(profile(), world_size=8, mesh_axes=(MeshAxis(name="tp", size=8),))
    changes = compare(old, new).changes
    assert [(change.subject, change.what) for change in changes] == [
        ("frame", "world_size"),
        ("frame", "mesh axes in use"),
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


def rendered(old, new, *, cost=None, **changes):
    """The text without what the change costs, which has tests of its own, unless it is given."""
    comparison = dataclasses.replace(compare(old, new), cost=cost or Cost())
    return render_comparison(comparison, snapshot="s.comm", **changes)


def change_lines(failure):
    return tuple(row.line().strip() for row in failure.rows if row.severity in {"change", "rest"})


def test_change_names_site_cause_and_remedy():
    site = Site(
        issued_in="layers.1",
        call_site="model.py:88",
        calls=Calls(nbytes=KIB, dtype="float32", count=2),
    )
    old = profile(row(FORWARD, "layers.2", "all_gather"))
    new = profile(row(FORWARD, "layers.2", "all_gather", 2, 2 * KIB, sites=(site,)))
    text = rendered(old, new, notes=("odd",))
    assert text.lines == (
        "comm_mode differs from s.comm",
        "  layers.2 in forward: all_gather[dp] 1 -> 2 (+1), 1.0 -> 2.0 KiB per rank, "
        "requested by the forward of layers.1, called from model.py:88",
        "  note: odd",
    )


def test_ranks_that_differ_are_named():
    old = profile(row(FORWARD, "a", "all_gather"))
    new = profile(row(FORWARD, "a", "all_gather", 2, 2 * KIB, ranks=(0, 1)))
    assert rendered(old, new).lines[1] == (
        "  a in forward: all_gather[dp] x1 of 1_024 B float32 on all ranks -> x2 of 1_024 B "
        "float32 on ranks 0-1"
    )
    new = profile(row(FORWARD, "a", "all_gather", 2, 2 * KIB, ranks=tuple(range(0, 64, 8))))
    assert rendered(old, new).lines[1].endswith(" on ranks 0-56/8")


def calls(count=1, nbytes=64, dtype="float32", **changes):
    return Calls(count=count, nbytes=nbytes, dtype=dtype, **changes)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        # Equal bytes of another dtype.
        (
            [calls(dtype="float16")],
            [calls(dtype="bfloat16")],
            "all_gather[dp] x1, in bfloat16 instead of float16",
        ),
        # Sizes that cancel.
        (
            [calls(2, 32)],
            [calls(1, 4), calls(1, 60)],
            "all_gather[dp] x2 of 32 B float32 -> x1 of 4 B float32, x1 of 60 B float32",
        ),
        (
            [calls(3), calls(1, 32)],
            [calls(3, ahead=1), calls(1, 32)],
            "some all_gather[dp] now prefetched (0 -> 0 or 1 units ahead of use)",
        ),
        (
            [calls(is_async=True)],
            [calls()],
            "all_gather[dp] now synchronous: the caller waits for it",
        ),
        (
            [calls(peer=1)],
            [calls(peer=-1)],
            "all_gather[dp] x1 of 64 B float32 peer +1 -> x1 of 64 B float32 ",
        ),
        (
            [calls()],
            [calls(reduce_op="max")],
            "all_gather[dp] x1, by max instead of sum",
        ),
        (
            [calls(reduce_op="avg"), calls(2, 32, reduce_op="avg")],
            [calls(), calls(2, 32)],
            "all_gather[dp] x3, by sum instead of avg",
        ),
        (
            [calls(nbytes=64), calls(2, 32)],
            [calls(nbytes=32, dtype="bfloat16"), calls(2, 16, dtype="bfloat16")],
            "all_gather[dp] x3, 128 -> 64 B per rank, in bfloat16 instead of float32",
        ),
        # The size or another call differs, too.
        (
            [calls()],
            [calls(nbytes=32, reduce_op="max")],
            "all_gather[dp] 64 -> 32 B per rank, x1 of 64 B float32 -> x1 of 32 B float32 by max",
        ),
        (
            [calls(), calls(1, 32, reduce_op="max")],
            [calls(), calls(1, 32)],
            "all_gather[dp] x2, x1 of 32 B float32 by max -> x1 of 32 B float32",
        ),
        (
            [calls(root_rank=0)],
            [calls(root_rank=2)],
            "all_gather[dp] x1 of 64 B float32 root 0 -> x1 of 64 B ",
        ),
        # A batch that grows needs no more than its bytes.
        ([calls()], [calls(nbytes=96)], "all_gather[dp] x1, 64 -> 96 B per rank"),
        # Sides that would be rounded to the same.
        (
            [calls(nbytes=74_000)],
            [calls(nbytes=74_008)],
            "all_gather[dp] x1, 74_000 -> 74_008 B per rank",
        ),
    ],
)
def test_calls_that_differ_are_a_difference(before, after, line):
    old = profile(row(FORWARD, "a", "all_gather", calls=tuple(sorted(before))))
    new = profile(row(FORWARD, "a", "all_gather", calls=tuple(sorted(after))))
    assert compare(old, old).changes == ()
    assert rendered(old, new).lines[1].startswith(f"  a in forward: {line}")


def test_new_gathers_of_layers_are_one_change():
    new = [
        row(FORWARD, owner, "all_gather", calls=(calls(ahead=ahead),))
        for ahead, owner in enumerate(LAYERS)
    ]
    for old, after in ((profile(), profile(*new)), (profile(*new), profile())):
        assert len(compare(old, after).changes) == 1
    other = [row(FORWARD, owner, "all_gather", calls=(calls(),)) for owner in LAYERS]
    assert len(compare(profile(*new), profile(*other)).changes) == len(LAYERS) - 1


NORMS = ("a", "b", "c")


def norms(kinds=("all_reduce",) * 3, *, phases=(FORWARD,) * 3, counts=(1, 1, 1), dtype="float32"):
    rows = zip(phases, NORMS, kinds, counts, strict=True)
    return [
        row(phase, owner, kind, count, 64 * 4**number * count, dtype=dtype)
        for number, (phase, owner, kind, count) in enumerate(rows)
    ]


def test_new_or_lost_calls_of_different_sizes_share_a_line():
    sums = "a, b, c in forward, each: all_reduce[dp]"
    both = profile(), profile(*norms())
    assert change_lines(rendered(*both)) == (f"{sums} 0 -> 1 (+1), 64 B to 1.0 KiB per rank",)
    lost = rendered(*reversed(both))
    assert change_lines(lost) == (f"{sums} 1 -> 0 (-1), 64 B to 1.0 KiB per rank",)


@pytest.mark.parametrize(
    "new",
    [
        norms(("all_reduce", "broadcast", "all_gather")),
        norms(phases=(FORWARD, BACKWARD, Phase.OPTIMIZER)),
        norms(counts=(1, 2, 3)),
        [norms(dtype=dtype)[at] for at, dtype in enumerate(("int32", "float32", "bfloat16"))],
    ],
    ids=["kinds", "phases", "counts", "dtypes"],
)
def test_new_calls_that_differ_otherwise_have_own_lines(new):
    assert len(change_lines(rendered(profile(), profile(*new)))) == 3


def test_lost_size_is_not_reported_as_0_bytes():
    def sent(*, is_object):
        made = calls(count=2, nbytes=0 if is_object else 64, is_object=is_object)
        return profile(row(FORWARD, None, "all_gather", calls=(made,)))

    both = (sent(is_object=False), sent(is_object=True))
    assert "128 B -> 2 of unknown size" in write_headline(rendered(*both))
    text = "\n".join(rendered(*both).lines)
    assert "128 B -> 2 of unknown size per rank" in text
    assert " 0 B" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"mesh_axes": (MeshAxis(name="dp", size=4, dims=((4, 2),)),)},
            "mesh: dp=4 stride 1 -> dp=4 stride 2",
        ),
        (
            {"mesh_axes": (MeshAxis(name="dp", size=4, dims=((2, 1), (2, 8))),)},
            "mesh: dp=4 stride 1 -> dp=2x2 stride 8x1",
        ),
        (
            {"mesh_axes": (MeshAxis(name="dp", size=4, groups=((0, 3, 5, 6), (1, 2, 4, 7))),)},
            "mesh: dp=4 stride 1 -> dp=4 ranks 0,3,5-6 | 1-2,4,7",
        ),
        (
            {"mesh_axes": (MeshAxis(name="dp", size=4, dims=((4, 1),), num_groups=8),)},
            "mesh: dp now has 8 process groups instead of 1, e.g. by new_group() in each module or "
            "step",
        ),
        (
            {"peaks": (GatheredPeak(nbytes=2048),)},
            "peak gathered: 1_024 B -> 2_048 B",
        ),
        (
            {
                "peaks": (
                    GatheredPeak(nbytes=1024, ranks=(0, 1)),
                    GatheredPeak(nbytes=4, ranks=(2, 3)),
                )
            },
            "peak gathered: 1_024 B -> 1_024 B on ranks 0-1 / 4 B on ranks 2-3",
        ),
    ],
)
def test_the_frame_is_compared(changes, line):
    frame = {
        "mesh_axes": (MeshAxis(name="dp", size=4, dims=((4, 1),)),),
        "peaks": (GatheredPeak(nbytes=1024),),
    }
    old = profile(row(FORWARD, "a", "all_gather"), **frame)
    new = profile(row(FORWARD, "a", "all_gather"), **{**frame, **changes})
    assert compare(old, old).changes == ()
    assert rendered(old, new).lines[1] == f"  {line}"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ((0, 3), (0,), "recorded ranks: 0,3 -> 0"),
        ((0,), (0, 3), "recorded ranks: 0 -> 0,3"),
        ((0,), (), "recorded ranks: 0 -> all"),
        ((5,), (0,), "recorded ranks: 5 -> 0"),
        ((0, 3), (0, 3), None),
        # The fake backend beside a file of all ranks.
        ((), (0,), None),
    ],
)
def test_which_ranks_were_recorded_is_compared(before, after, line):
    old = profile(row(FORWARD, "a", "all_gather"), recorded_ranks=before)
    new = profile(row(FORWARD, "a", "all_gather"), recorded_ranks=after)
    if line is None:
        assert compare(old, new).changes == ()
    else:
        assert rendered(old, new).lines[1] == f"  {line}"


def sent(*lines, phase=FORWARD, owner="a", ranks=(), **changes):
    """A row of one call of some KiB at each line, as it was recorded."""
    sites = [
        Site(
            issued_in=owner,
            call_site=line,
            calls=Calls(nbytes=size * KIB, dtype="float32", count=1),
            **changes,
        )
        for line, size in lines
    ]
    counts = Counter(Calls(nbytes=size * KIB, dtype="float32") for _, size in lines)
    held = tuple(sorted(dataclasses.replace(one, count=n) for one, n in counts.items()))
    return row(phase, owner, "all_gather", calls=held, sites=tuple(sites), ranks=ranks)


# Files without a directory, by which each line of a case is short.
A, B, C, D, E = (f"{name}.py:1" for name in "abcde")


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        # Added, with a size of its own; then with that of an unchanged call.
        ([(A, 1)], [(A, 1), (B, 5)], ", called from b.py:1"),
        ([(A, 1)], [(A, 1), (B, 1)], ", called from a.py:1 or b.py:1"),
        # The size of one of two changes, and becomes that of the other.
        ([(A, 1), (B, 4)], [(A, 1), (B, 9)], ", called from b.py:1"),
        ([(A, 1), (B, 4)], [(A, 1), (B, 1)], ", called from a.py:1 or b.py:1"),
        # Two are new.
        ([(A, 1)], [(A, 1), (B, 5), (C, 5)], ", called from b.py:1 and c.py:1"),
        ([], [(A, 1), (B, 5)], ", called from a.py:1 and b.py:1"),
        (
            [],
            [(line, 1) for line in (A, B, C, D, E)],
            ", called from a.py:1, b.py:1, c.py:1 and 2 more",
        ),
        # The lines that are left did not change.
        ([(A, 1), (B, 5)], [(A, 1)], ""),
        ([(A, 1), (B, 1)], [(A, 1)], ""),
    ],
)
def test_change_names_all_lines_that_may_be_new(before, after, place):
    # Another module, without which all of it would be explained.
    other = row(FORWARD, "b", "broadcast")
    old = profile(*[sent(*before)] * bool(before), other)
    text = rendered(old, profile(sent(*after), other))
    line = next(one for one in change_lines(text) if "all_gather" in one)
    assert line.partition(", called")[1:] == place.partition(", called")[1:]


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        # Of the line with 4 calls, at most one was there before; of one with 3 of 4, all may have.
        ([A], [A, B, B, B, B], "called from b.py:1"),
        ([A, A, A], [A, B, B, B], "called from a.py:1 or b.py:1"),
        ([A, B, B], [A, B, B, B], "called from a.py:1 or b.py:1"),
    ],
)
def test_line_with_more_calls_than_before_is_named(before, after, place):
    old, new = (sent(*((line, 1) for line in one)) for one in (before, after))
    other = row(FORWARD, "b", "broadcast")
    assert change_lines(rendered(profile(old, other), profile(new, other)))[0].endswith(place)


def reduced(*sums):
    """An all-reduce of 4 B at each line, with its operation, and whether a DTensor asked for it."""
    one = Calls(nbytes=4, dtype="float32")
    kinds = [dataclasses.replace(one, reduce_op=op, count=1) for _, op, _ in sums]
    sites = [
        Site(issued_in=None, call_site=line, calls=call, is_of_dtensor=is_of_dtensor)
        for (line, _, is_of_dtensor), call in zip(sums, kinds, strict=True)
    ]
    return row(Phase.OUTSIDE, None, "all_reduce", calls=replace_fields(kinds), sites=tuple(sites))


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [("", "max", "called from b.py:1"), ("max", "", "called from a.py:1 or b.py:1")],
)
def test_line_that_reduces_otherwise_is_named(before, after, place):
    old, new = (profile(reduced((A, "", False), (B, op, False))) for op in (before, after))
    assert change_lines(rendered(old, new))[0].rpartition(", ")[2] == place


@pytest.mark.parametrize(
    ("is_of_dtensor", "place"),
    [(False, "at b.py:1"), (True, "at a.py:1 or b.py:1")],
)
def test_step_of_dtensors_names_no_plain_call(is_of_dtensor, place):
    new = profile(
        reduced((A, "", is_of_dtensor), (B, "", True)),
        row(Phase.OUTSIDE, None, "(Partial(sum))->(Replicate())", subject="redistribution"),
    )
    text = "partial DTensors reduced outside forward and backward: +1 call, +4 B"
    assert change_lines(rendered(profile(reduced((A, "", False))), new)) == (f"{text}, {place}",)


def test_calls_that_differ_in_time_alone_are_not_new():
    added = sent((A, 1), (A, 1), (B, 5))
    early, late = (calls(1, nbytes=KIB, ahead=ahead) for ahead in (0, 1))
    before = row(FORWARD, "a", "all_gather", calls=(early, late))
    (change,) = compare(profile(before), profile(added)).changes
    assert [site.call_site for _, site in change.new_calls.sites] == [B]


def test_change_of_some_ranks_names_their_lines():
    old = profile(sent((A, 1), ranks=(0, 1)), sent((B, 1), ranks=(2, 3)))
    new = profile(sent((A, 1), ranks=(0, 1)), sent((B, 1), (C, 5), ranks=(2, 3)))
    assert change_lines(rendered(old, new))[0].endswith(", called from c.py:1")


def test_change_of_two_modules_names_the_lines_of_both():
    old = profile(sent((A, 1)), sent((A, 1), owner="b"))
    new = profile(sent((A, 1), (B, 5)), sent((A, 1), (C, 5), owner="b"))
    assert change_lines(rendered(old, new))[0].endswith(", called from b.py:1 and c.py:1")


@pytest.mark.parametrize(
    ("is_of_backward", "place"), [(False, ", called from hooks.py:7"), (True, "")]
)
def test_change_in_backward_names_the_line_of_a_hook(is_of_backward, place):
    call = row(BACKWARD, "a", "broadcast")
    hook = sent(("hooks.py:7", 1), phase=BACKWARD, is_of_backward=is_of_backward)
    (line,) = change_lines(rendered(profile(call), profile(call, hook)))
    assert line == f"a in backward: all_gather[dp] 0 -> 1 (+1), 0 -> 1.0 KiB per rank{place}"


def sites_of(failure):
    return [(site, row.text) for row in failure.rows for site in row.sites]


def test_sites_name_the_line_of_each_change():
    def calls_of(phase, count):
        lines = [("train.py:7", 1)] * count
        return sent(*lines, phase=phase, is_of_backward=phase is BACKWARD)

    both = profile(calls_of(FORWARD, 1), calls_of(BACKWARD, 1))
    for phase, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
        changed = profile(calls_of(phase, 2), calls_of(other, 1))
        ((site, text),) = sites_of(rendered(both, changed))
        assert site == "train.py:7"
        # Without a line in forward, the first place that differs stands for all of it.
        assert "all_gather" in text
    assert sites_of(rendered(both, both)) == []
    assert sites_of(rendered(both, profile())) == []


def test_async_is_compared_if_both_sides_record_it():
    def sent(shows_async, *held):
        return profile(row(FORWARD, "a", "all_gather", calls=held), shows_async=shows_async)

    known = sent(True, calls(1), calls(2, is_async=True))  # noqa: FBT003  # a case
    assert compare(known, sent(False, calls(3))).changes == ()  # noqa: FBT003  # a case
    assert compare(sent(False, calls(3)), known).changes == ()  # noqa: FBT003  # a case
    assert compare(known, sent(True, calls(3))).changes  # noqa: FBT003  # a case
    assert compare(known, sent(False, calls(4))).changes  # noqa: FBT003  # a case


def test_what_a_change_costs_comes_after_it():
    old, new = profile(*step()), profile(*step(reduces=4))
    assert compare(old, new).cost == cost_of_change(old, new)
    assert compare(old, old).cost == Cost()
    text = rendered(old, new, cost=cost_of_change(old, new))
    # 9 gathers and 5 reductions of 1 KiB, then 20.
    assert text.select("cost")[0].text == (
        "x4.0 bytes in reduce_scatter[dp] (5.0 -> 20.0 KiB per rank), +107 % in all"
    )
    severities = [row.severity for row in text.rows]
    assert severities[0] == "change"
    assert not {"change", "likely"} & {*severities[severities.index("cost") :]}


def test_the_largest_growth_comes_first():
    owners = [f"module_{letter}" for letter in "abcdefghijklmnop"]
    new = [
        row(FORWARD, owner, "all_gather", 2 + place, KIB * (2 + place))
        for place, owner in enumerate(owners)
    ]
    text = rendered(profile(*step(owners=owners)), profile(*new))
    assert change_lines(text)[0].startswith("module_p in forward")
