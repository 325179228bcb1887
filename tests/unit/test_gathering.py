"""Exchange of texts through torch's stores, and errors about ranks that are missing."""

import threading
import time
from functools import partial

import pytest
from running import wait_for
from torch.distributed import FileStore, PrefixStore, TCPStore

from pytest_fsdp_comm.errors import RanksDivergedError, RecordingError
from pytest_fsdp_comm.gathering import Exchange, RankFiles, TextStore, gather_values
from pytest_fsdp_comm.ranks.wire.load import extend_under_load


@pytest.fixture(scope="module")
def tcp_port():
    # The system chooses the port, and no other test can use it while the store exists.
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield served.port
    del served


@pytest.fixture(params=["file", "tcp"])
def connect(request, tmp_path, tcp_port):
    """Return a function that creates clients of one store."""

    def make():
        if request.param == "file":
            return FileStore(str(tmp_path / "store"), -1)
        store = TCPStore("localhost", tcp_port, is_master=False, wait_for_workers=False)
        return PrefixStore(request.node.name, store)

    return make


@pytest.fixture
def exchanges(connect):
    def make(ranks, test=0):
        stores = (TextStore(PrefixStore(f"test{test}", connect())) for _ in ranks)
        return [Exchange(store, rank, ranks) for rank, store in zip(ranks, stores, strict=True)]

    return make


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
        thread.join(timeout=extend_under_load(30))
    return results


# A TCP store drops a client that sends 8 MiB in one call.
@pytest.mark.parametrize("text", ["", "ü\udcff\n", "ü" * (5 << 20)], ids=["empty", "odd", "long"])
def test_store_round_trips_texts_of_any_length(connect, text):
    here, there = TextStore(connect()), TextStore(connect())
    assert not there.has("name")
    here.put("name", text)
    # A TCP store does not confirm writes, so another client may see them later.
    wait_for(lambda: there.has("name"))
    assert there.get("name") == text


def test_exchange_returns_texts_in_rank_order(exchanges):
    ranks = (0, 3, 7)
    ends = exchanges(ranks)
    for number in range(3):
        calls = (partial(end, f"{number} ü {rank}") for end, rank in zip(ends, ranks, strict=True))
        assert in_threads(*calls) == [[f"{number} ü {rank}" for rank in ranks]] * 3


def test_exchange_puts_each_distinct_text_once(exchanges, monkeypatch):
    ends = exchanges(range(5))
    sizes = []
    put = TextStore.put

    def put_and_count(self, name, text):
        sizes.append(len(text))
        put(self, name, text)

    monkeypatch.setattr(TextStore, "put", put_and_count)
    same, different = "same" * 1000, "other" * 1000
    assert in_threads(*(partial(end, same) for end in ends)) == [[same] * 5] * 5
    assert sizes == [64] * 5
    texts = [same, different, same, different, same]
    results = in_threads(*(partial(end, text) for end, text in zip(ends, texts, strict=True)))
    assert results == [texts] * 5
    for received in results:
        assert received[0] is received[2] is received[4]
        assert received[1] is received[3]
    assert sorted(sizes) == [*[64] * 10, 4000, 5000]


def test_exchange_names_the_rank_that_left(exchanges):
    here, ended = exchanges((0, 1))
    ended.leave()
    with pytest.raises(RanksDivergedError) as caught:
        here("text")
    assert str(caught.value) == (
        "rank 0 made comparison 1 of comm_mode or fsdp_tree, but rank 1 ended the test without it; "
        "every rank must make the same comparisons in the same order (is one inside an "
        "`if rank == ...`?)"
    )
    with pytest.raises(RanksDivergedError, match="rank 1 ended the test before joined"):
        here.share("joined")


def test_share_waits_for_all_ranks(exchanges):
    ranks = (0, 1, 2)
    arrived, seen_by = [], []

    def meet(rank, end):
        time.sleep(0.05 * rank)
        arrived.append(rank)
        end.share("joined")
        seen_by.append(sorted(arrived))

    in_threads(*(partial(meet, rank, end) for rank, end in enumerate(exchanges(ranks))))
    assert seen_by == [[0, 1, 2]] * 3


def test_gather_values_rejects_different_labels(exchanges):
    ends = exchanges((0, 1))
    results = in_threads(
        lambda: gather_values(ends[0], "comm_mode", "{}"),
        lambda: gather_values(ends[1], "fsdp_tree", "# tree"),
    )
    assert str(results[0]).startswith("this rank reached comm_mode, but another rank reached")
    assert "every rank must make the same comparisons" in str(results[1])
    same = in_threads(*(lambda e=end: gather_values(e, "comm_mode", "a\nb") for end in ends))
    assert same == [["a\nb", "a\nb"]] * 2


def test_rank_files_are_collected_and_removed(tmp_path):
    files = RankFiles(tmp_path / "out.json")
    files.publish(9, "of an earlier run")
    files.clear()
    for rank, text in {2: "ü", 10: "same" * 9, 1: "same" * 9, 0: ""}.items():
        files.publish(rank, text)
    texts = files.collect(4, timeout_s=0)
    assert [*texts.items()] == [(0, ""), (1, "same" * 9), (2, "ü"), (10, "same" * 9)]
    assert texts[1] is texts[10]
    assert [*tmp_path.iterdir()] == []


def test_rank_files_wait_for_the_last_rank(tmp_path):
    files = RankFiles(tmp_path / "out.json")
    files.publish(0, "a")
    last = threading.Timer(0.1, files.publish, (1, "b"))
    last.start()
    assert files.collect(2, timeout_s=extend_under_load(30)) == {0: "a", 1: "b"}
    last.join()


def test_rank_files_name_the_ranks_that_wrote_nothing(tmp_path):
    files = RankFiles(tmp_path / "out.json")
    files.publish(1, "a")
    with pytest.raises(RecordingError, match=r"after 0\.01 s ranks 0, 2-3 had written none"):
        files.collect(4, timeout_s=0.01)
