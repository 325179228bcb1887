"""Tests of ``fsdp-comm accept``: copied files, output and refused files."""

import pytest
import sample_profiles
from sample_files import TREE

from pytest_fsdp_comm.command_line import accept as accepting
from pytest_fsdp_comm.snapshots.comm_text import format_profile

OLD, NEW, OTHER = (format_profile(sample_profiles.profile(layers=layers)) for layers in (3, 4, 5))
TREE = TREE.replace("world_size 4\nmesh dp=4", "world_size 8\nmesh dp=8")
FROZEN = TREE.replace("float32[8] dp", "float32[8] frozen dp")
COMM, ADDED = "test_a/test_x.ws8.comm", "test_b/test_y.ws8.comm"
FILES = {COMM: (OLD, NEW), "test_a/test_x.ws8.tree.comm": (TREE, FROZEN), ADDED: (None, NEW)}


@pytest.fixture
def artifacts(write, project):
    for path, (old, new) in FILES.items():
        write(f"ci/received/{path}", new)
        if old is not None:
            write(f"snapshots/{path}", old)
    return project


def files(project):
    root = project / "snapshots"
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.comm")}


def test_accept_copies_and_prints_what_changed(artifacts, fsdp_comm):
    done = fsdp_comm("accept", "ci")
    assert done.status == 0
    assert files(artifacts) == {path: new for path, (_, new) in FILES.items()}
    assert done.lines[0] == "snapshots/test_a/test_x.ws8.comm:"
    assert done.lines[1].startswith("  +30 % bytes in all")
    assert "snapshots/test_a/test_x.ws8.tree.comm:" in done.lines
    assert "snapshots/test_b/test_y.ws8.comm: added" in done.lines
    assert done.lines[-1] == "3 files accepted"
    again = fsdp_comm("accept", "ci")
    assert (again.status, again.lines) == (0, ["0 files accepted"])


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        (f"ci/received/{COMM}", NEW[:-4], f"ci/received/{COMM}, line "),
        (f"ci/received/{COMM}", b"\xff", f"ci/received/{COMM}, line 1"),
        (f"snapshots/{COMM}", f"<<<<<<< ours\n{OLD}", f"snapshots/{COMM}, line 1"),
    ],
)
def test_accept_refuses_broken_files_only(artifacts, write, fsdp_comm, path, content, problem):  # noqa: PLR0917  # fixtures
    write(path, content)
    before = files(artifacts)
    done = fsdp_comm("accept", "ci")
    assert done.status == 2
    assert f"fsdp-comm: refused: {problem}" in done.err
    assert done.lines[-1] == "2 files accepted, 1 refused"
    assert files(artifacts)[COMM] == before[COMM]


def test_accept_writes_nothing_outside_snapshots(artifacts, write, fsdp_comm):
    outside = artifacts / "outside"
    outside.mkdir()
    (artifacts / "snapshots/test_b").symlink_to(outside)
    (artifacts / f"snapshots/{COMM}").unlink()
    write("outside.comm", OLD)
    (artifacts / f"snapshots/{COMM}").symlink_to(artifacts / "outside.comm")
    done = fsdp_comm("accept", "ci")
    assert done.status == 2
    assert done.lines[-1] == "1 file accepted, 2 refused"
    assert f"snapshots/{COMM} leads through a symlink to {artifacts}/outside.comm" in done.err
    assert list(outside.iterdir()) == []
    assert (artifacts / "outside.comm").read_text() == OLD


def test_accept_refuses_links_in_artifacts(artifacts, write, fsdp_comm):
    secret = write("elsewhere.comm", OTHER)
    received = artifacts / f"ci/received/{COMM}"
    received.unlink()
    received.symlink_to(secret)
    done = fsdp_comm("accept", "ci")
    assert f"ci/received/{COMM} leads through a symlink to {secret}" in done.err
    assert files(artifacts)[COMM] == OLD
    (artifacts / "ci").rename(artifacts / "of-ci")
    (artifacts / "ci").mkdir()
    (artifacts / "ci/received").symlink_to(artifacts / "of-ci/received")
    assert "has no directory 'received'" in fsdp_comm("accept", "ci").err
    # The directory that the user names may be a link.
    received = artifacts / f"of-ci/received/{COMM}"
    received.unlink()
    received.write_text(NEW)
    (artifacts / "ci/received").unlink()
    (artifacts / "ci").rmdir()
    (artifacts / "ci").symlink_to("of-ci")
    assert fsdp_comm("accept", "ci").status == 0
    assert files(artifacts)[COMM] == NEW


def test_accept_prints_no_control_characters(artifacts, write, fsdp_comm):
    write("ci/received/test_a/test_\x1b[31m.ws8.comm", "broken")
    write("ci/received/test_a/test_\x1b[32m.ws8.comm", NEW)
    done = fsdp_comm("accept", "ci")
    assert "\x1b" not in done.out + done.err
    assert len(files(artifacts)) == 4


def test_accept_uses_the_snapshot_dir_setting(artifacts, write, fsdp_comm):
    (artifacts / "snapshots").rename(artifacts / "reviewed")
    # Settings are read despite a missing plugin and a broken conftest.py.
    write("pytest.ini", "[pytest]\naddopts = --nope\nfsdp_comm_snapshot_dir = reviewed\n")
    write("conftest.py", "raise RuntimeError\n")
    assert fsdp_comm("accept", "ci").status == 0
    assert (artifacts / "reviewed" / COMM).read_text() == NEW
    # As in a directory above the project.
    write("pytest.ini", "[pytest]\n")
    assert "there is no snapshot directory snapshots" in fsdp_comm("accept", "ci").err
    assert not (artifacts / "snapshots").exists()


def test_accept_reports_unreadable_settings(artifacts, write, fsdp_comm):
    write("pytest.ini", "[pytest\n")
    done = fsdp_comm("accept", "ci")
    assert done.status == 2
    assert (
        f"pytest could not read its configuration for {artifacts}; see the error above" in done.err
    )
    assert "pytest.ini:1: " in done.err
    assert files(artifacts)[COMM] == OLD


def test_accept_without_artifacts_is_an_error(project, fsdp_comm):
    (project / "snapshots").mkdir()
    done = fsdp_comm("accept", "nope")
    assert done.status == 2
    assert "has no directory 'received'" in done.err


def test_accept_reports_an_unwritable_file(artifacts, fsdp_comm, monkeypatch):
    write_all = accepting.write_atomically

    def write_some(path, text):
        if path.name.endswith(".tree.comm"):
            raise OSError(28, "No space left on device")
        write_all(path, text)

    monkeypatch.setattr(accepting, "write_atomically", write_some)
    done = fsdp_comm("accept", "ci")
    assert "cannot write snapshots/test_a/test_x.ws8.tree.comm (No space left on dev" in done.err
    assert (done.status, done.lines[-1]) == (2, "2 files accepted, 1 refused")
    assert files(artifacts)["test_a/test_x.ws8.tree.comm"] == TREE
