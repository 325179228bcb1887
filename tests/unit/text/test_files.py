"""Files are written atomically, and no temporary file stays."""

import os
import stat
from pathlib import Path

import pytest

from pytest_fsdp_comm.text.files import is_nested, write_all_atomically, write_atomically


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("call", ["write_text", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, old, call, error):
    path = tmp_path / "test_a.ws4.comm"
    if old:
        path.write_text(old)

    def interrupted(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(path), call, interrupted)
        with pytest.raises(error):
            write_atomically(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ([old] if old else [])
    write_atomically(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]


def test_write_replaces_the_file_at_once(tmp_path):
    path = tmp_path / "test_a.ws4.comm"
    path.write_text("old")
    with path.open() as file:
        write_atomically(path, "new")
        # Whoever reads the old file has all of it.
        assert file.read() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_permissions_are_those_of_a_new_file(tmp_path):
    (tmp_path / "mine").write_text("")
    for _ in range(2):
        write_atomically(tmp_path / "snapshot", "text")
        mode = stat.S_IMODE((tmp_path / "snapshot").stat().st_mode)
        assert mode == stat.S_IMODE((tmp_path / "mine").stat().st_mode)


def test_several_files_are_replaced_together(tmp_path, monkeypatch):
    """If the second file cannot be written, the first one stays as it was."""
    first, second = tmp_path / "a.comm", tmp_path / "b.comm"
    first.write_text("old")

    def write_first(path, *arguments, write=Path.write_text, **options):
        if "b.comm" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_first)
        with pytest.raises(OSError, match="No space left"):
            write_all_atomically({first: "new", second: "new"})
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    write_all_atomically({first: "new", second: "newer"})
    assert [first.read_text(), second.read_text()] == ["new", "newer"]


def test_devices_are_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("path", "nested"),
    [
        ("snapshots", True),
        ("snapshots/tests", True),
        (".", True),
        ("link", True),
        ("link/tests", True),
        ("../to/snapshots", True),
        ("snapshots-of-ci", False),
        ("other/snapshots", False),
        ("loop/x", False),
    ],
)
def test_nested_paths_are_found_through_links(tmp_path, path, nested):
    top = tmp_path / "to"
    (top / "snapshots").mkdir(parents=True)
    (top / "link").symlink_to("snapshots")
    (top / "loop").symlink_to("loop")
    assert is_nested(top / path, top / "snapshots") == nested
    assert is_nested(top / "snapshots", top / path) == nested
