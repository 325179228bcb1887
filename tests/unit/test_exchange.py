"""Ranks exchange texts through files, and say which rank does not come."""

import threading
from functools import partial

import pytest

from pytest_fsdp_comm.errors import RanksDivergedError
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.ranks.exchange import DirectoryExchange


def in_threads(*calls):
    results = [None] * len(calls)

    def run(place, call):
        try:
            results[place] = call()
        except RanksDivergedError as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def test_texts_come_in_rank_order(tmp_path):
    ranks = (0, 3, 7)
    ends = {rank: DirectoryExchange(tmp_path, rank, ranks) for rank in ranks}
    for number in range(3):
        results = in_threads(*(partial(ends[rank], f"{number} ü {rank}") for rank in ranks))
        assert results == [[f"{number} ü {rank}" for rank in ranks]] * 3


def test_a_rank_that_left_is_named(tmp_path):
    here, gone = (DirectoryExchange(tmp_path, rank, (0, 1)) for rank in (0, 1))
    gone.leave()
    with pytest.raises(RanksDivergedError) as caught:
        here("text")
    assert str(caught.value) == (
        "rank 0 made comparison 1 of comm_mode or fsdp_tree, but rank 1 ended the test without it; "
        "every rank has to make the same comparisons in the same order (is one inside an "
        "`if rank == ...`?)"
    )
    with pytest.raises(RanksDivergedError, match="rank 1 ended the test before joined"):
        here.meet("joined")


def test_different_things_are_not_mixed(tmp_path):
    ends = [DirectoryExchange(tmp_path, rank, (0, 1)) for rank in (0, 1)]
    results = in_threads(
        lambda: gather_alike(ends[0], "comm_mode", "{}"),
        lambda: gather_alike(ends[1], "fsdp_tree", "# tree"),
    )
    assert str(results[0]).startswith("this rank compared comm_mode with a snapshot, another one")
    assert "every rank has to make the same comparisons" in str(results[1])
    same = in_threads(*(lambda e=end: gather_alike(e, "comm_mode", "a\nb") for end in ends))
    assert same == [["a\nb", "a\nb"]] * 2
