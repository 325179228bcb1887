"""What is said of calls that nothing can hide any more, and of host waits."""

from dataclasses import replace

import pytest
from sample_profiles import FORWARD, changed, counted, profile, role, row

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import Row, Site, replace_fields
from pytest_fsdp_comm.reports.changes import render_comparison


def gathers_exposed(base, *owners, is_async=False):
    """A profile in which nothing hides the forward gathers of some units."""

    def expose(one):
        if one.owner not in owners or (one.phase, role(one)) != (FORWARD, "parameters"):
            return one
        calls = (replace(call, exposed=True, is_async=is_async) for call in one.calls)
        return replace(one, calls=tuple(calls))

    return replace(changed(base, expose), shows_overlap=True)


def waiting(base, *owners, way="item", phase=FORWARD, count=1):
    waits = [counted("host_wait", phase, owner, way, count) for owner in owners]
    return replace(base, rows=(*base.rows, *waits), shows_overlap=True)


BASE = replace(profile(), shows_overlap=True)
LAYERS = ("layers.0", "layers.1", "layers.2")


def told(old, new):
    return [line.strip() for line in render_comparison(compare(old, new), snapshot="s").body]


def test_host_wait_that_exposes_gathers_is_their_cause():
    new = waiting(gathers_exposed(BASE, *LAYERS[1:]), *LAYERS)
    first, likely, cost = told(BASE, new)
    assert first.startswith(
        "gathers of layers.{1..2} in forward can no longer be hidden: 2 calls, "
    )
    assert likely == "likely: the host now waits for the GPU: layers.{0..2} in forward (item)"
    assert cost.startswith("cost: bytes unchanged, exposed 0 -> ")
    assert cost.endswith("per rank, peak gathered unchanged") or "peak" not in cost


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, ", at train.py:9"),
        # FSDP gathers parameters, and the line that calls .backward() issues all calls of backward.
        ({"role": "parameters"}, ""),
        ({"is_of_backward": True}, ""),
        # This line issues only calls that are hidden as before.
        ({"exposed": False}, ""),
    ],
)
def test_exposed_calls_name_the_line_that_issues_them(changes, place):
    call = Calls(nbytes=64, dtype="float32", role=changes.get("role", ""), count=1)
    sent = Row(phase=Phase.BACKWARD, owner=None, what="all_reduce", axis="dp", calls=(call,))
    exposed = replace(call, exposed=True)
    site = Site(
        issued_in=None,
        call_site="train.py:9",
        calls=replace(exposed, exposed=changes.get("exposed", True)),
        is_of_backward=changes.get("is_of_backward", False),
    )
    new = replace(sent, calls=(exposed,), sites=(site,))
    old, new = (replace(BASE, rows=(*BASE.rows, one)) for one in (sent, new))
    assert told(old, new)[0].partition(" per rank")[2] == place


def test_calls_that_became_synchronous_name_their_line():
    call = Calls(nbytes=64, dtype="float32", is_async=True, count=1)
    old = Row(phase=Phase.OUTSIDE, owner=None, what="all_reduce", axis="dp", calls=(call,))
    calls = replace(call, is_async=False)
    site = Site(issued_in=None, call_site="train.py:9", calls=calls)
    new = replace(old, calls=(calls,), sites=(site,))
    sides = (replace(BASE, rows=(*BASE.rows, one)) for one in (old, new))
    assert told(*sides)[0] == (
        "(no-module) outside forward and backward: all_reduce[dp] now synchronous: the caller "
        "waits for it, at train.py:9"
    )


@pytest.mark.parametrize("count", [3, 5])
def test_other_calls_do_not_change_a_share(count):
    """Of two sizes, one is always asynchronous; the number of the others changes."""
    started = Calls(nbytes=1_024, dtype="float32", is_async=True, count=3)
    row = Row(phase=Phase.OUTSIDE, owner=None, what="all_reduce", axis="dp", calls=(started,))
    rows = (
        replace(row, calls=(Calls(nbytes=4, dtype="float32", count=n), started)) for n in (4, count)
    )
    old, new = (replace(BASE, rows=(*BASE.rows, one)) for one in rows)
    assert "asynchronous" not in str(told(old, new))


def test_host_wait_that_exposes_nothing_says_so():
    new = waiting(BASE, None, phase=Phase.OPTIMIZER)
    assert told(BASE, new) == [
        "(no-module) in the optimizer phase: the host now waits for the GPU once (item), which "
        "exposes no call"
    ]


def test_host_waits_of_two_phases_have_a_line_each():
    new = waiting(waiting(BASE, *LAYERS), *LAYERS, phase=Phase.RECOMPUTE, count=4)
    assert told(BASE, new) == [
        f"layers.{{0..2}} in {phase}: the host now waits for the GPU {count} times (item), which "
        "exposes no call"
        for phase, count in (("forward", 3), ("recompute", 12))
    ]


def test_host_waits_beside_other_counts_are_recorded():
    """Twice the all-reduces, but other numbers of waits."""

    def logging(number, **waits):
        profile = replace(
            BASE, rows=(*BASE.rows, row(Phase.OUTSIDE, None, "all_reduce", 4, count=number))
        )
        for way, count in waits.items():
            profile = waiting(profile, None, way=way, phase=Phase.OUTSIDE, count=count)
        return profile

    old = logging(1, synchronize=2, item=4, copy_to_device=5)
    lines = "\n".join(told(old, logging(2, synchronize=2, item=5, copy_to_device=6)))
    assert "the host waits for the GPU 4 -> 5 times (item)" in lines
    assert "the host waits for the GPU 5 -> 6 times (copy_to_device)" in lines
    assert "synchronize" not in lines
    assert "twice as many" not in lines


def test_host_wait_of_another_rank_is_a_row():
    rows = [
        replace(counted("host_wait", FORWARD, "head", "item"), ranks=(rank,)) for rank in (0, 1)
    ]
    old, new = (replace(BASE, rows=(*BASE.rows, row)) for row in rows)
    assert told(old, new)[0] == (
        "head in forward: host waits for the GPU (item), on rank 0: 1 -> 0 times (-1); on rank 1: "
        "0 -> 1 times (+1)"
    )


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (1, 0, "the host no longer waits for the GPU (item)"),
        (4, 1, "the host waits for the GPU 4 -> 1 times (item)"),
        (1, 4, "the host waits for the GPU 1 -> 4 times (item), which exposes no call"),
    ],
)
def test_count_of_host_waits_is_compared(old, new, line):
    sides = [waiting(BASE, "layers.0", count=count) if count else BASE for count in (old, new)]
    assert told(*sides) == [f"layers.0 in forward: {line}"]


def test_hidden_again_is_good_news():
    lines = told(gathers_exposed(BASE, "layers.1"), BASE)
    assert lines[0].startswith("gathers of layers.1 in forward can be hidden now: 1 call, ")
    assert not any(line.startswith("likely") for line in lines)


def test_asynchronous_calls_are_waited_for_at_once():
    def hide(one):
        return replace(one, calls=tuple(replace(call, exposed=False) for call in one.calls))

    new = gathers_exposed(BASE, "layers.1", is_async=True)
    hidden = changed(new, hide)
    lines = told(replace(hidden, shows_overlap=True), new)
    assert "likely: the calls are waited for at once" in lines
    # Synchronous calls have another cause.
    lines = told(BASE, gathers_exposed(BASE, "layers.1"))
    assert not any("waited for at once" in line for line in lines)


def test_exposed_calls_are_ignored_against_real_ranks():
    new = waiting(gathers_exposed(BASE, *LAYERS), *LAYERS)
    assert compare(profile(), new).changes == ()
    assert compare(new, profile()).changes == ()


def test_renamed_units_keep_their_exposure():
    def rename(one):
        owner = one.owner and one.owner.replace("layers", "blocks")
        return replace(one, owner=owner)

    old = gathers_exposed(BASE, "layers.1")
    new = replace(changed(old, rename), shows_overlap=True)
    assert not any("hidden" in line for line in told(old, new))


@pytest.mark.parametrize(
    ("way", "causes"),
    [
        ("synchronize", ["less backward prefetching"]),
        (
            "item",
            [
                "the host now waits for the GPU: layers.{0..2} in forward",
                "less backward prefetching",
            ],
        ),
    ],
)
def test_less_prefetching_is_the_cause_and_not_its_wait(way, causes):
    """Without prefetching, FSDP1 synchronizes with the GPU; only user code reads values."""

    def gather_late(one):
        calls = tuple(replace(call, ahead=0) for call in one.calls)
        return replace(one, calls=replace_fields(calls)) if one.axis else one

    late = changed(gathers_exposed(BASE, *LAYERS[1:]), gather_late)
    lines = told(BASE, waiting(late, *LAYERS, way=way))
    likely = [line.removeprefix("likely: ") for line in lines if line.startswith("likely: ")]
    assert [text.split(" (")[0] for text in likely] == causes


def test_prefetching_precedes_waits_that_expose_nothing():
    """The cause follows the change that it explains."""

    def gather_late(one):
        calls = tuple(replace(call, ahead=0) for call in one.calls)
        return replace(one, calls=replace_fields(calls)) if one.axis else one

    late = replace(changed(BASE, gather_late), shows_overlap=True)
    lines = told(BASE, waiting(late, *LAYERS))
    assert "no longer prefetched" in lines[0]
    assert lines[1].startswith("likely: less backward prefetching")
    assert "waits for the GPU" in lines[2]
    assert lines[2].endswith("which exposes no call")


def test_calls_of_another_size_are_exposed_without_bytes():
    """In half the bytes, and one more of them exposed: no difference is the size of a call."""

    def reduced(dtype, nbytes, exposed):
        calls = [
            Calls(nbytes=size, dtype=dtype, role="gradients", count=1, exposed=number < exposed)
            for number, size in enumerate((nbytes, 8 * nbytes))
        ]
        row = Row(phase=Phase.BACKWARD, owner="", what="all_reduce", axis="dp", calls=(*calls,))
        return replace(BASE, rows=(*BASE.rows, row))

    old, new = reduced("float32", 4_096, exposed=1), reduced("bfloat16", 2_048, exposed=2)
    (line,) = (line for line in told(old, new) if "can no longer be hidden" in line)
    assert line.endswith("in backward can no longer be hidden: 1 call per rank")
