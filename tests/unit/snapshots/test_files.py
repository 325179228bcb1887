"""Snapshot files are written atomically, and no temporary file stays."""

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fsdp_comm.snapshots.documents import write_atomically
from pytest_fsdp_comm.snapshots.extension import CommSnapshotExtension


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


def test_artifacts_replace_those_of_earlier_run(tmp_path):
    place = Path("tests/test_a/test_x[é].ws2.tree.comm")
    files = [tmp_path / side / place for side in ("received", "expected")]
    options = SimpleNamespace(artifacts_dir=tmp_path, snapshot_dir=Path("/snapshots"))

    def keep(received, expected):
        holder, location = SimpleNamespace(_options=options), f"/snapshots/{place}"
        CommSnapshotExtension.keep_artifacts(holder, location, received=received, expected=expected)

    keep(received="new", expected="old")
    assert [file.read_text() for file in files] == ["new", "old"]
    # The snapshot is gone, and then what was recorded is equal to it.
    keep(received="newer", expected=None)
    assert [file.is_file() for file in files] == [True, False]
    keep(received=None, expected=None)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
