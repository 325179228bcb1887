"""Paths and ranks as people write them."""

from pathlib import Path

import pytest

from pytest_fsdp_comm.text.paths import show_path
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks, runs_of


def test_a_path_is_relative_to_what_it_lies_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = str(tmp_path / "src" / "model.py")
    assert show_path(inside) == "src/model.py"
    assert show_path(inside, tmp_path / "src") == "model.py"
    assert show_path(Path(inside), Path("/elsewhere")) == inside
    assert show_path("/elsewhere/model.py") == "/elsewhere/model.py"


def test_a_path_stays_as_it_is_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert show_path(str(gone / "model.py")) == str(gone / "model.py")


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((), ()),
        ((3,), ((3, 3),)),
        ((0, 1, 2, 5, 7, 8), ((0, 2), (5, 5), (7, 8))),
    ],
)
def test_consecutive_numbers_form_runs(numbers, runs):
    assert runs_of(numbers) == runs


def test_ranks_are_named_in_ascending_order():
    assert name_ranks((3, 0, 2)) == "ranks 0, 2-3"
    assert fold_equal({2: "b", 1: "a", 0: "b"}) == [([0, 2], "b"), ([1], "a")]
