"""Files of failed comparisons for ``--comm-artifacts``."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fsdp_comm.snapshots.extension import CommSnapshotExtension


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


def test_link_among_artifacts_keeps_snapshots(tmp_path):
    """A link inside DIR/received is not seen when the session starts."""
    snapshots = tmp_path / "snapshots"
    (snapshots / "test_a").mkdir(parents=True)
    reviewed = snapshots / "test_a/test_x.ws2.comm"
    reviewed.write_text("reviewed")
    for side in ("received", "expected"):
        (tmp_path / "kept" / side).mkdir(parents=True)
        (tmp_path / "kept" / side / "test_a").symlink_to(snapshots / "test_a")
    options = SimpleNamespace(artifacts_dir=tmp_path / "kept", snapshot_dir=snapshots)
    for text in ("new", None):
        with pytest.warns(pytest.PytestWarning, match=r"test_a leads into the snapshot dir"):
            CommSnapshotExtension.keep_artifacts(
                SimpleNamespace(_options=options), str(reviewed), received=text, expected=None
            )
    assert reviewed.read_text() == "reviewed"
    assert [*snapshots.rglob("*.comm")] == [reviewed]
