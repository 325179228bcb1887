"""Ranks exchange texts through files, and name the rank that does not come."""

import threading
from functools import partial

import pytest

from pytest_fsdp_comm.errors import RanksDivergedError
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.ranks.wire import exchange
from pytest_fsdp_comm.ranks.wire.exchange import DirectoryExchange, Marks, TextDirectory


def directory_exchange(path, rank, ranks, number=0):
    departures = Marks(path / "departures")
    return DirectoryExchange(path, rank, ranks, number=number, departures=departures)


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
    ends = {rank: directory_exchange(tmp_path, rank, ranks) for rank in ranks}
    for number in range(3):
        results = in_threads(*(partial(ends[rank], f"{number} ü {rank}") for rank in ranks))
        assert results == [[f"{number} ü {rank}" for rank in ranks]] * 3


def test_each_text_is_read_once(tmp_path, monkeypatch):
    ranks = tuple(range(5))
    ends = [directory_exchange(tmp_path, rank, ranks) for rank in ranks]
    sizes = []
    read = TextDirectory.get

    def noted(self, name):
        text = read(self, name)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(TextDirectory, "get", noted)
    same, other = "same" * 1000, "other" * 1000
    texts = [same, other, same, other, same]
    results = in_threads(*(partial(end, text) for end, text in zip(ends, texts, strict=True)))
    assert results == [texts] * 5
    for found in results:
        assert found[0] is found[2] is found[4]
        assert found[1] is found[3]
    # Each rank reads five digests, and the one text that is not its own.
    assert sorted(sizes) == [*[64] * 25, *[4000] * 2, *[5000] * 3]


def test_a_rank_that_left_is_named(tmp_path):
    here, gone = (directory_exchange(tmp_path, rank, (0, 1)) for rank in (0, 1))
    gone.leave()
    with pytest.raises(RanksDivergedError) as caught:
        here("text")
    assert str(caught.value) == (
        "rank 0 made comparison 1 of comm_mode or fsdp_tree, but rank 1 ended the test without it; "
        "every rank must make the same comparisons in the same order (is one inside an "
        "`if rank == ...`?)"
    )
    with pytest.raises(RanksDivergedError, match="rank 1 ended the test before joined"):
        here.meet("joined")


def test_the_last_rank_at_a_point_wakes_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "_LEFT_POLL_S", 40.0)  # none looks for the others itself
    ranks = (0, 1, 2)
    came, left = [], []

    def meet(rank):
        end = directory_exchange(tmp_path, rank, ranks)
        came.append(rank)
        end.meet("joined")
        # Whoever goes on, all have come.
        left.append(sorted(came))

    assert in_threads(*(partial(meet, rank) for rank in ranks)) == [None] * 3
    assert left == [[0, 1, 2]] * 3


def test_different_things_are_not_mixed(tmp_path):
    ends = [directory_exchange(tmp_path, rank, (0, 1)) for rank in (0, 1)]
    results = in_threads(
        lambda: gather_alike(ends[0], "comm_mode", "{}"),
        lambda: gather_alike(ends[1], "fsdp_tree", "# tree"),
    )
    assert str(results[0]).startswith("this rank compared comm_mode with a snapshot, another rank")
    assert "every rank must make the same comparisons" in str(results[1])
    same = in_threads(*(lambda e=end: gather_alike(e, "comm_mode", "a\nb") for end in ends))
    assert same == [["a\nb", "a\nb"]] * 2


def test_the_next_test_of_the_same_ranks_begins_anew(tmp_path):
    first = [directory_exchange(tmp_path, rank, (0, 1)) for rank in (0, 1)]
    assert in_threads(*(partial(end, "first") for end in first)) == [["first", "first"]] * 2
    for end in first:
        end.leave()
    second = [directory_exchange(tmp_path, rank, (0, 1), number=1) for rank in (0, 1)]
    texts = in_threads(*(partial(end, text) for end, text in zip(second, "ab", strict=True)))
    assert texts == [["a", "b"]] * 2
    second[1].leave()
    with pytest.raises(RanksDivergedError):
        second[0]("text")
