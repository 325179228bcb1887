"""Paths as people write them."""

from pathlib import Path

from pytest_fsdp_comm.text.paths import show_path


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
