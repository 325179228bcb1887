"""The texts that explain a hang, from positions made by hand."""

from dataclasses import replace

import pytest

from pytest_fsdp_comm.ranks.hangs.waiting import (
    explain_mismatch,
    explain_waiting,
    find_stranded,
    format_stacks,
)
from pytest_fsdp_comm.ranks.wire.results import Activity, GroupPosition, IssuedCollective, Position


def position(
    *issued, site="model.py:1 in forward", name="0", axis="dp", more=(), is_waiting=True, **changes
):
    issued = waited(*issued) if is_waiting else issued
    return Position(site=site, groups=(group(*issued, name=name, axis=axis), *more), **changes)


def waited(*issued):
    """Collectives of a main thread that waits."""
    return tuple(replace(one, is_waited_in=not one.is_done) for one in issued)


def group(*issued, name, axis):
    is_shape = axis.startswith("size")
    return GroupPosition(
        name=name, axis=axis, is_shape=is_shape, ranks=(0, 1, 2), collectives=issued
    )


def done(seq, kind="all_gather", nbytes=8):
    return IssuedCollective(seq=seq, kind=kind, nbytes=nbytes, is_done=True)


def waits(seq, kind="all_gather", nbytes=8):
    return IssuedCollective(seq=seq, kind=kind, nbytes=nbytes, is_done=False)


def served(owners, first=1):
    """Finished collectives for modules, then one more that the rank waits in."""
    calls = [replace(done(seq), owner=owner) for seq, owner in enumerate(owners.split(), first)]
    return position(*calls, waits(first + len(calls)))


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (
            ["tower a b", "a b b", "tower a b"],
            "#1 of dp: called on ranks 0, 2 for tower, on rank 1 for a",
        ),
        (["a tower a", "a a b"], "#2 of dp: called on rank 0 for tower, on rank 1 for a"),
        # What nothing recorded is unknown, and a rank may be far behind.
        (["a tower a", "a"], None),
        (["a a", "a a"], None),
        ([], None),
    ],
)
def test_ranks_that_parted_are_named(ranks, line):
    lines = explain_waiting({rank: served(owners) for rank, owners in enumerate(ranks)})
    assert [text for text in lines if "diverged" in text] == (
        [f"ranks diverged at {line}"] if line else []
    )
    unknown = {rank: position(done(1), waits(2)) for rank in range(3)}
    unknown |= {1: served("a"), 2: position()}
    assert not any("diverged" in text for text in explain_waiting(unknown))


def test_ranks_that_parted_before_what_is_known():
    lines = explain_waiting({0: served("a b", first=20), 1: served("b b", first=20)})
    assert (
        "ranks diverged at #20 of dp or earlier: called on rank 0 for a, on rank 1 for b"
    ) in lines


def test_diverged_parallel_groups_share_a_line():
    ways = {rank: served(f"layers.{rank // 2} b" if rank else "a b") for rank in range(12)}
    other = {
        rank: replace(one, groups=(replace(one.groups[0], name="1", ranks=(10, 11)),))
        for rank, one in ways.items()
        if rank >= 10
    }
    lines = explain_waiting(ways | other)
    assert [text for text in lines if "diverged" in text] == [
        "ranks diverged at #1 of dp: called on rank 0 for a, on rank 1 for layers.0, on ranks 2-3 "
        "for layers.1, on ranks 4-9 for 3 others"
    ]


def test_nothing_is_explained_where_nobody_waits():
    assert explain_waiting({}) == []
    assert explain_waiting({rank: position(done(1)) for rank in range(3)}) == []


AWAY = {"site": "x.py:1 in f"}
ENDED = {"activity": Activity.HAS_ENDED}
GIL = Position(site="loop.py:3 in spin", activity=Activity.HOLDS_GIL)
BUSY = position(waits(1), site="load.py:1 in read", is_waiting=False)
WAITS = "rank 0 waits in all_gather #2 of dp (8 B) at model.py:1 in forward"
NEVER = "ranks 1-2 never called it (their last call on dp was all_gather #1)"


@pytest.mark.parametrize(
    ("positions", "lines"),
    [
        # Gloo may let a sender go before its receivers have all.
        (
            [
                position(done(1), **AWAY),
                position(waits(1), module="layers.3"),
                position(waits(1), module="layers.3"),
            ],
            [
                "all wait for rank 0, which is at x.py:1 in f",
                "ranks 1-2 wait in all_gather #1 of dp for layers.3 (8 B) at model.py:1 in forward",
                "rank 0 finished it, and is at x.py:1 in f",
            ],
        ),
        (
            [position(waits(4)), position(waits(4, nbytes=1024)), position(waits(4))],
            [
                "ranks 0, 2 wait in all_gather #4 of dp (8 B) at model.py:1 in forward",
                "rank 1 waits in all_gather #4 of dp (1.0 KiB) at model.py:1 in forward",
                "  the sizes differ: all ranks must pass the same shape to #4 of dp",
            ],
        ),
        # The last rank is dead.
        (
            [position(waits(2), axis=""), GIL],
            [
                "rank 0 waits for rank 1, which holds the GIL at loop.py:3 in spin",
                "  and for rank 2, which is dead",
                WAITS.replace("dp", "the group of ranks 0-2"),
            ],
        ),
        # A collective in the background keeps nobody.
        ([BUSY, BUSY, position(**AWAY)], []),
        (
            [BUSY, position(waits(1)), position(**AWAY)],
            [
                "rank 1 waits for rank 2, which is at x.py:1 in f",
                "rank 1 waits in all_gather #1 of dp (8 B) at model.py:1 in forward",
                "rank 0 called it, and is at load.py:1 in read",
                "rank 2 never called it, and is at x.py:1 in f",
            ],
        ),
        # Several ranks in the plural.
        (
            [position(waits(2)), *[position(done(1), **ENDED)] * 2],
            [
                "rank 0 waits for ranks 1-2, which have finished the test",
                WAITS,
                f"{NEVER}, and have finished the test",
            ],
        ),
        (
            [position(waits(2)), *[position(done(1), **AWAY)] * 2],
            [
                "rank 0 waits for ranks 1-2, which are at x.py:1 in f",
                WAITS,
                f"{NEVER}, and are at x.py:1 in f",
            ],
        ),
        (
            [position(waits(2)), GIL, GIL],
            ["rank 0 waits for ranks 1-2, which hold the GIL at loop.py:3 in spin", WAITS],
        ),
        ([position(waits(2))], ["rank 0 waits for ranks 1-2, which are dead", WAITS]),
    ],
)
def test_those_that_are_waited_for_come_first(positions, lines):
    assert explain_waiting(dict(enumerate(positions))) == lines


def test_groups_without_names_are_told_apart():
    shape = "size3.stride1"
    one = position(waits(1), axis=shape, name="3")
    assert (
        "rank 0 waits in all_gather #1 of size3.stride1 (ranks 0-2) (8 B) at model.py:1 in forward"
    ) in explain_waiting({0: one})
    # In opposite orders: each has both groups, and waits in another one.
    three, four = (group(name=name, axis=shape) for name in ("3", "4"))
    both = {
        0: position(waits(1), axis=shape, name="3", more=[four]),
        1: position(waits(1), axis=shape, name="4", more=[three]),
        2: position(axis=shape, name="3", more=[four], site="away.py:1 in f"),
    }
    at = "(8 B) at model.py:1 in forward"
    assert explain_waiting(both) == [
        "all wait for rank 2, which is at away.py:1 in f",
        f"rank 0 waits in all_gather #1 of size3.stride1 (ranks 0-2, torch's 3) {at}",
        "rank 1 never called it",
        "rank 2 never called it, and is at away.py:1 in f",
        f"rank 1 waits in all_gather #1 of size3.stride1 (ranks 0-2, torch's 4) {at}",
        "rank 0 never called it",
        "rank 2 never called it, and is at away.py:1 in f",
    ]
    assert explain_waiting(both | {2: replace(both[0])})[0] == "ranks 0-2 wait for each other"


def test_parallel_groups_of_a_mesh_tell_one_story():
    pairs = {
        rank: GroupPosition(
            name=f"pair{rank // 2}",
            axis="dp",
            is_shape=False,
            ranks=(rank - rank % 2, rank - rank % 2 + 1),
            collectives=() if rank % 2 else waited(waits(1)),
        )
        for rank in range(64)
    }
    positions = {
        rank: Position(site="b.py:2 in g" if rank % 2 else "a.py:1 in f", groups=(pair,))
        for rank, pair in pairs.items()
    }
    assert explain_waiting(positions) == [
        "all wait for ranks 1-63/2, which are at b.py:2 in g",
        "ranks 0-62/2 wait in all_gather #1 of dp (8 B) at a.py:1 in f",
        "ranks 1-63/2 never called it, and are at b.py:2 in g",
    ]


def test_64_ranks_in_different_states_fit_on_a_screen():
    # Each waits in a group with the next one, at a line of its own; every eighth does not answer.
    positions = {
        rank: Position(
            site=f"model.py:{rank} in forward",
            activity=list(Activity)[rank // 8 % len(Activity)] if rank % 8 == 0 else Activity.RUNS,
            groups=tuple(
                GroupPosition(
                    name=str(first),
                    axis=f"axis{first}",
                    is_shape=bool(first % 2),
                    ranks=(first, first + 1),
                    collectives=waited(waits(rank + 1)),
                )
                for first in (rank - 1, rank)
            ),
        )
        for rank in range(64)
    }
    found = explain_waiting(positions)
    stack = "\n".join(f"model.py:{{rank}} in f{n}" for n in range(5))
    found += format_stacks(
        {rank: stack.replace("{rank}", str(rank)) for rank in positions}, "{ranks} {is} at:"
    )
    assert 20 < len(found) <= 38
    assert found[-2:] == ["ranks 3-63 are at:", "    61 other places"]
    assert all(len(line) < 200 for line in found)
    same = position(waits(1), site="model.py:1 in f")
    same = replace(same, groups=(replace(same.groups[0], ranks=tuple(range(64))),))
    few = explain_waiting(dict.fromkeys(range(63), same) | {63: Position(site="b.py:2 in g")})
    assert few == [
        "all wait for rank 63, which is at b.py:2 in g",
        "ranks 0-62 wait in all_gather #1 of dp (8 B) at model.py:1 in f",
        "rank 63 never called it, and is at b.py:2 in g",
    ]


@pytest.mark.parametrize(
    ("activity", "says"),
    [
        (Activity.RUNS, ", which is at lock.py:1 in f: lock.acquire()"),
        (Activity.REPORTS, ", which failed at lock.py:1 in f: lock.acquire()"),
        (Activity.HAS_ENDED, ", which has finished the test"),
        (Activity.HOLDS_GIL, ", which holds the GIL at lock.py:1 in f: lock.acquire()"),
        (Activity.SILENT, ", which does not respond"),
    ],
)
def test_explain_waiting_describes_each_activity(activity, says):
    away = Position(site="lock.py:1 in f", code="lock.acquire()", activity=activity)
    found = explain_waiting({0: position(waits(1)), 1: position(waits(1)), 2: away})
    assert found[0] == f"all wait for rank 2{says}"
    # What it issued is only known of a rank that answers.
    assert any("rank 2 never called it" in line for line in found) == activity.is_known


@pytest.mark.parametrize(
    ("kinds", "sizes", "says"),
    [
        (("all_gather", "all_gather"), (8, 8), ""),
        (("all_gather", "all_reduce"), (8, 8), "the collectives differ"),
        (("all_gather", "all_gather"), (8, 16), "the sizes differ"),
        # What only the source gives, and splits that are uneven on purpose.
        (("scatter", "scatter"), (8, 0), ""),
        (("all_to_all", "all_to_all"), (8, 16), ""),
    ],
)
@pytest.mark.parametrize("is_done", [True, False])
def test_only_what_torch_wants_equal_is_compared(kinds, sizes, says, is_done):
    (kind, other), (nbytes, more) = kinds, sizes
    issued = IssuedCollective(seq=1, kind=other, nbytes=more, is_done=is_done)
    found = explain_waiting(
        {0: position(waits(1, kind, nbytes)), 1: position(issued), 2: position(issued)}
    )
    notes = [line.strip().partition(":")[0] for line in found if line.startswith("  ")]
    assert notes == ([says] if says else [])
    if says:
        assert not any("waits for" in line for line in found)


def test_waiting_for_those_that_are_blamed_is_no_news():
    positions = {
        0: position(waits(1)),
        1: position(waits(1)),
        2: position(activity=Activity.HAS_ENDED),
    }
    assert explain_waiting(positions, blamed=[2]) == []
    assert explain_waiting(positions)[0] == "all wait for rank 2, which has finished the test"


ENDLESS = replace(waits(2), timeout_s=30)
LEFT = position(done(1), **ENDED)
JOINING = Position(site="", is_joining=True)


@pytest.mark.parametrize(
    ("positions", "stranded"),
    [
        ([position(ENDLESS), LEFT, position(ENDLESS)], {0: (1,), 2: (1,)}),
        ([position(ENDLESS), LEFT, LEFT], {0: (1, 2)}),
        # It has issued collectives on other groups only, or none, or has destroyed the group.
        ([position(ENDLESS), position(done(9), name="1", **ENDED)], {0: (1,)}),
        ([position(ENDLESS), Position(site="", **ENDED)], {0: (1,)}),
        ([JOINING, Position(site="", **ENDED)], {0: (1,)}),
        # It waits in a comparison, so it issues no more either.
        ([position(ENDLESS), position(done(1), activity=Activity.COMPARES)], {0: (1,)}),
        ([position(ENDLESS), position(done(2), activity=Activity.COMPARES)], {}),
        # All have issued it, or may yet.
        ([position(ENDLESS), position(done(2), **ENDED)], {}),
        ([position(ENDLESS), position(waits(9), is_waiting=False, **ENDED)], {}),
        ([position(ENDLESS), position(done(1), **AWAY)], {}),
        ([position(ENDLESS), GIL], {}),
        ([JOINING, LEFT], {}),
        # It computes, or what it waits in ends by itself.
        ([position(ENDLESS, is_waiting=False), LEFT], {}),
        ([position(done(2), **AWAY), LEFT], {}),
        ([position(replace(ENDLESS, timeout_s=10)), LEFT], {}),
        # Not one of the group.
        ([position(ENDLESS), position(done(2), **ENDED), position(ENDLESS), LEFT], {}),
    ],
)
def test_stranded_ranks_wait_for_ended_ones(positions, stranded):
    found = find_stranded(dict(enumerate(positions)), timeout_s=20)
    assert {rank: absent for rank, (_, absent) in found.items()} == stranded


def test_waits_in_two_groups_are_listed_apart():
    first = position(done(1), waits(2))
    second = position(waits(1, "all_reduce"), name="1", axis="world")
    found = explain_waiting({0: first, 1: second, 2: second})
    assert found[0] == "ranks 0-2 wait for each other"
    assert "rank 0 waits in all_gather #2 of dp (8 B) at model.py:1 in forward" in found
    assert "ranks 1-2 wait in all_reduce #1 of world (8 B) at model.py:1 in forward" in found


def called(numel, kind="all_reduce", *, seq=1, is_done=False, is_last=True):
    return IssuedCollective(
        seq=seq,
        kind=kind,
        nbytes=4 * numel,
        sent=f"{numel:,} float32" if numel else "",
        is_done=is_done,
        is_last=is_last,
    )


def mismatch(*issued, failed=(0, 1, 2), **changes):
    return explain_mismatch(
        {rank: position(one, **changes) for rank, one in enumerate(issued) if one}, failed
    )


@pytest.mark.parametrize(
    ("issued", "says"),
    [
        (
            (called(400_000), called(4), called(4)),
            "rank 0 called all_reduce of 400,000 float32, ranks 1-2 of 4 float32: mismatch in "
            "#1 of dp at model.py:1 in forward",
        ),
        # gloo has failed in it, which counts as done; one rank is dead and left no words.
        (
            (None, called(4, is_done=True), called(8)),
            "rank 1 called all_reduce of 4 float32, rank 2 of 8 float32: mismatch in "
            "#1 of dp at model.py:1 in forward",
        ),
        (
            (called(4), called(0, "barrier"), called(4)),
            "rank 1 called barrier, ranks 0, 2 all_reduce of 4 float32: mismatch in "
            "#1 of dp at model.py:1 in forward",
        ),
        # gloo runs it as an all-reduce, and only the call that still waits tells.
        (
            (called(16, "reduce_scatter"), called(16, is_done=True), called(32, is_done=True)),
            "rank 2 called reduce_scatter of 32 float32, ranks 0-1 of 16 float32: mismatch in "
            "#1 of dp at model.py:1 in forward",
        ),
        ((called(4), called(4), called(4)), ""),
        ((called(4, "scatter"), called(0, "scatter"), called(0, "scatter")), ""),
        ((called(4, "all_to_all"), called(8, "all_to_all"), called(12, "all_to_all")), ""),
        ((called(16, "reduce_scatter"), called(16, is_done=True)), ""),
        # What came after it failed.
        (tuple(called(numel, is_last=False) for numel in (4, 8, 4)), ""),
    ],
)
def test_explain_mismatch_names_the_rarest_call_first(issued, says):
    assert mismatch(*issued) == says


def test_only_what_a_rank_failed_in_is_compared():
    unequal = (called(4), called(8), called(4))
    assert mismatch(*unequal, failed=[]) == ""
    assert mismatch(*unequal, failed=[1]) != ""


def test_mismatch_at_one_place_tells_it():
    one, other = position(called(4)), position(called(8), site="a.py:2 in g")
    sent = "rank 1 called all_reduce of 8 float32, ranks 0, 2 of 4 float32: mismatch in #1 of dp"
    assert explain_mismatch({0: one, 1: other, 2: one}, [0]) == sent
    # One is dead, or stopped in the C++ of a library.
    unknown = position(called(4), site="")
    assert explain_mismatch({0: unknown, 1: other, 2: unknown}, [0]) == f"{sent} at a.py:2 in g"


def test_many_sizes_are_counted():
    group = GroupPosition(
        name="0", axis="dp", is_shape=False, ranks=tuple(range(8)), collectives=()
    )
    positions = {
        rank: Position(site="", groups=(replace(group, collectives=(called(rank + 1),)),))
        for rank in range(8)
    }
    assert explain_mismatch(positions, [0]) == (
        "rank 0 called all_reduce of 1 float32, rank 1 of 2 float32, rank 2 of 3 float32, "
        "ranks 3-7 in 5 other ways: mismatch in #1 of dp"
    )
