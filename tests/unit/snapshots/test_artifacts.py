"""What ``--comm-artifacts`` keeps, though every rank of a test writes it."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from pytest_fsdp_comm.snapshots.files import Artifacts

PLACE = Path("tests/test_a/test_x[é].ws2.tree.comm")


def keep_often(directory):
    kept = Artifacts.of(directory, PLACE)
    for _ in range(200):
        kept.keep(received="new\n", expected="old\n", story=["a", "b"])


def contents(directory):
    return {
        str(file.relative_to(directory)): file.read_text()
        for file in directory.rglob("*")
        if file.is_file()
    }


def test_three_files_are_laid_out_alike_and_ranks_do_not_disturb_each_other(tmp_path):
    # As ranks, which fail at the same time.
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(keep_often, [tmp_path] * 4))
    assert contents(tmp_path) == {
        f"received/{PLACE}": "new\n",
        f"expected/{PLACE}": "old\n",
        "stories/tests/test_a/test_x[é].ws2.tree.txt": "a\nb\n",
    }


def test_what_is_kept_of_an_earlier_run_is_replaced_and_forgotten(tmp_path):
    kept = Artifacts.of(tmp_path, PLACE)
    kept.keep(received="new\n", expected="old\n", story=["a"])
    # The snapshot is gone.
    kept.keep(received="newer\n", expected=None, story=["b"])
    assert sorted(contents(tmp_path).values()) == ["b\n", "newer\n"]
    kept.forget()
    assert contents(tmp_path) == {}
    kept.forget()
