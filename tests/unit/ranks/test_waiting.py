"""The texts that explain a hang, from positions made by hand."""

from pytest_fsdp_comm.ranks.hangs.waiting import explain_waiting
from pytest_fsdp_comm.ranks.wire.positions import (
    Activity,
    GroupPosition,
    IssuedCollective,
    Position,
)


def position(*issued, site="model.py:1 in forward", name="0", axis="dp", **more):
    return Position(site=site, groups=(group(*issued, name=name, axis=axis),), **more)


def group(*issued, name, axis):
    is_shape = axis.startswith("size")
    return GroupPosition(
        name=name, axis=axis, is_shape=is_shape, ranks=(0, 1, 2), collectives=issued
    )


def done(seq, kind="all_gather", nbytes=8):
    return IssuedCollective(seq=seq, kind=kind, nbytes=nbytes, is_done=True)


def waits(seq, kind="all_gather", nbytes=8):
    return IssuedCollective(seq=seq, kind=kind, nbytes=nbytes, is_done=False)


def test_nothing_is_explained_where_nobody_waits():
    assert explain_waiting({}) == []
    assert explain_waiting({rank: position(done(1)) for rank in range(3)}) == []


def test_a_rank_that_has_gone_on_is_waited_for():
    # Gloo may let a sender go before its receivers have all.
    found = explain_waiting(
        {
            0: position(done(1), site="model.py:9 in step"),
            1: position(waits(1), module="layers.3"),
            2: position(waits(1), module="layers.3"),
        }
    )
    assert found == [
        "all wait for rank 0, at model.py:9 in step",
        "ranks 1-2 wait in all_gather #1 of dp for layers.3 (8 B) at model.py:1 in forward",
        "rank 0 finished it, and is at model.py:9 in step",
    ]


def test_sizes_that_differ_are_explained():
    found = explain_waiting(
        {
            0: position(waits(4)),
            1: position(waits(4, nbytes=1024)),
            2: position(waits(4)),
        }
    )
    assert found == [
        "ranks 0, 2 wait in all_gather #4 of dp (8 B) at model.py:1 in forward",
        "rank 1 waits in all_gather #4 of dp (1.0 KiB) at model.py:1 in forward",
        "  the sizes differ: #4 of dp must have the same shape on every rank",
    ]


def test_a_dead_rank_and_one_that_holds_the_gil_are_both_blamed():
    silent = Position(site="loop.py:3 in spin", activity=Activity.HOLDS_GIL)
    waiting = position(waits(1), axis="")
    assert explain_waiting({0: waiting, 1: silent}) == [
        "all wait for rank 1, which holds the GIL at loop.py:3 in spin",
        "all wait for rank 2, which is dead",
        "rank 0 waits in all_gather #1 of the group of ranks 0-2 (8 B) at model.py:1 in forward",
    ]


def test_a_group_has_the_best_name_that_a_rank_knows():
    found = explain_waiting(
        {
            0: position(waits(1), axis="world"),
            1: position(waits(1)),
            2: position(waits(1), axis="size3.stride1"),
        }
    )
    assert found == ["ranks 0-2 wait in all_gather #1 of dp (8 B) at model.py:1 in forward"]


def test_groups_without_names_are_told_apart():
    shape = "size3.stride1"
    one = position(waits(1), axis=shape, name="3")
    other = position(waits(1), axis=shape, name="4")
    (first, *_) = explain_waiting({0: one})
    assert first.startswith("all wait for")
    assert (
        "rank 0 waits in all_gather #1 of size3.stride1 (ranks 0-2) (8 B) at model.py:1 in forward"
    ) in explain_waiting({0: one})
    found = explain_waiting({0: one, 1: other})
    for number in ("3", "4"):
        label = f"size3.stride1 (ranks 0-2), torch's group {number}"
        assert any(label in line for line in found), found
    # Parallel groups of one mesh axis have one name.
    found = explain_waiting({0: position(waits(1)), 1: position(waits(1), name="4")})
    assert not any("torch's group" in line for line in found)


def test_waiting_for_those_that_are_blamed_is_no_news():
    positions = {
        0: position(waits(1)),
        1: position(waits(1)),
        2: position(activity=Activity.HAS_ENDED),
    }
    assert explain_waiting(positions, blamed=[2]) == []
    assert explain_waiting(positions)[0] == "all wait for rank 2, which has finished the test"


def test_waits_in_two_groups_are_listed_apart():
    first = position(done(1), waits(2))
    second = position(waits(1, "all_reduce"), name="1", axis="world")
    found = explain_waiting({0: first, 1: second, 2: second})
    assert found[0] == "rank 0 waits in all_gather #2 of dp (8 B) at model.py:1 in forward"
    assert "ranks 1-2 wait in all_reduce #1 of world (8 B) at model.py:1 in forward" in found


def test_several_ranks_are_spoken_of_in_the_plural():
    waiting = position(waits(2), axis="world")
    gone = position(done(1), axis="world", activity=Activity.HAS_ENDED)
    away = position(done(1), axis="world", site="model.py:7 in skip")
    silent = Position(site="loop.py:3 in spin", activity=Activity.HOLDS_GIL)
    waits_in = "rank 0 waits in all_gather #2 of world (8 B) at model.py:1 in forward"
    last = "never issued it (their last of world was all_gather #1)"
    assert explain_waiting({0: waiting, 1: gone, 2: gone}) == [
        "all wait for ranks 1-2, which have finished the test",
        waits_in,
        f"ranks 1-2 {last}, and have finished the test",
    ]
    assert explain_waiting({0: waiting, 1: away, 2: away}) == [
        "all wait for ranks 1-2, at model.py:7 in skip",
        waits_in,
        f"ranks 1-2 {last}, and are at model.py:7 in skip",
    ]
    assert explain_waiting({0: waiting, 1: silent, 2: silent}) == [
        "all wait for ranks 1-2, which hold the GIL at loop.py:3 in spin",
        waits_in,
    ]
    assert explain_waiting({0: waiting}) == ["all wait for ranks 1-2, which are dead", waits_in]
