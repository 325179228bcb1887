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
            write(f"ci/expected/{path}", old)
    return project


def files(project):
    root = project / "snapshots"
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.comm")}


def test_accept_copies_and_prints_what_changed(artifacts, fsdp_comm):
    done = fsdp_comm("accept", "ci")
    assert done.status == 0
    assert files(artifacts) == {path: new for path, (_, new) in FILES.items()}
    assert done.lines[0] == "snapshots/test_a/test_x.ws8.comm:"
    assert done.lines[1].startswith("  layers: ")
    assert done.lines[2].startswith("  cost: +30 % bytes in all")
    assert "snapshots/test_a/test_x.ws8.tree.comm:" in done.lines
    assert "snapshots/test_b/test_y.ws8.comm: added" in done.lines
    assert done.lines[-1] == "3 files accepted"
    again = fsdp_comm("accept", "ci")
    assert (again.status, again.lines) == (0, ["0 files accepted"])


@pytest.mark.parametrize(
    ("names", "accepted"),
    [
        (["test_x"], [COMM, "test_a/test_x.ws8.tree.comm"]),
        (["test_b/test_y.ws8.comm"], [ADDED]),
        (["test_a/*"], [COMM, "test_a/test_x.ws8.tree.comm"]),
        (["*.tree.comm", "test_y"], ["test_a/test_x.ws8.tree.comm", ADDED]),
        (["test_x.ws8"], [COMM, "test_a/test_x.ws8.tree.comm"]),
        (["test_b.py::test_y"], [ADDED]),
        (["test_b.py::test_y[ws8]"], [ADDED]),
        (["test_y[ws8]"], [ADDED]),
    ],
)
def test_accept_of_names_leaves_other_files(artifacts, fsdp_comm, names, accepted):
    before = files(artifacts)
    done = fsdp_comm("accept", "ci", *names)
    assert done.status == 0
    assert done.lines[-1] == f"{len(accepted)} file{'s' if len(accepted) > 1 else ''} accepted"
    new = {path: new for path, (_, new) in FILES.items() if path in accepted}
    assert files(artifacts) == before | new


@pytest.mark.parametrize(
    "name",
    [
        "TestC::test_y[1-ws4]",
        "tests/test_b.py::TestC::test_y[1-ws4]",
        "tests/test_b/TestC.test_y[[]1].*",
        "tests/test_b.py::TestC::test_y",
        "test_b/*",
        "TestC.test_y[1].ws4.comm",
    ],
)
def test_accept_knows_a_test_by_class_and_parameters(write, project, fsdp_comm, name):
    names = ["TestC.test_y[1].ws4", "TestC.test_y[1].ws2", "TestC.test_y[2].ws4"]
    (project / "snapshots").mkdir(exist_ok=True)
    for one in names:
        write(f"ci/received/tests/test_b/{one}.comm", NEW)
    done = fsdp_comm("accept", "ci", name)
    assert done.status == 0, done.err
    accepted = {path.removesuffix(".comm").rpartition("/")[2] for path in files(project)}
    all_of_test = {"tests/test_b/TestC.test_y[[]1].*": names[:2], "test_b/*": names}
    all_of_test["tests/test_b.py::TestC::test_y"] = names
    expected = all_of_test.get(name, names[:1])
    assert accepted == {*expected}


def test_accept_of_node_id_needs_its_module(write, project, fsdp_comm):
    (project / "snapshots").mkdir()
    for module in ("tests/test_a", "tests/test_b", "test_b"):
        write(f"ci/received/{module}/test_y.ws4.comm", NEW)
    assert fsdp_comm("accept", "ci", "tests/test_b.py::test_y[ws4]").status == 0
    assert {*files(project)} == {"tests/test_b/test_y.ws4.comm"}
    assert fsdp_comm("accept", "ci", "test_c.py::test_y").status == 2


@pytest.mark.parametrize(
    "name", ["test_y[a/b]", "test_y[a/b-ws4]", "test_y[a%2Fb]", "test_y[a%2Fb].ws4"]
)
def test_accept_knows_parameters_as_in_pytest_and_files(write, project, fsdp_comm, name):
    (project / "snapshots").mkdir()
    for parameters in ("a%2Fb", "b"):
        write(f"ci/received/test_b/test_y[{parameters}].ws4.comm", NEW)
    assert fsdp_comm("accept", "ci", name).status == 0
    assert {*files(project)} == {"test_b/test_y[a%2Fb].ws4.comm"}


def test_accept_of_unknown_name_accepts_nothing(artifacts, fsdp_comm):
    before = files(artifacts)
    done = fsdp_comm("accept", "ci", "test_x", "test_z", "test_[a")
    assert done.status == 2
    assert done.err == (
        "fsdp-comm: expected names or patterns of received snapshots, got 'test_z', 'test_[a', "
        "which match none of test_a/test_x.ws8.comm, test_a/test_x.ws8.tree.comm and 1 more\n"
    )
    assert files(artifacts) == before
    empty = fsdp_comm("accept", "ci", "")
    assert (empty.status, files(artifacts)) == (2, before)
    assert "got '', which match none of" in empty.err


@pytest.mark.usefixtures("artifacts")
def test_accept_counts_files_that_break_training(write, fsdp_comm):
    lost = sample_profiles.changed(
        sample_profiles.profile(),
        lambda row: None if sample_profiles.role(row) == "gradients" else row,
    )
    write(f"ci/received/{COMM}", format_profile(lost))
    done = fsdp_comm("accept", "ci")
    assert done.lines[1].startswith("  breaks training: gradients of (root), layers.{0..2}")
    assert done.lines[-1] == ("3 files accepted, 1 of them although the change breaks training")


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


@pytest.mark.parametrize(
    ("current", "expected", "change"),
    [
        (OTHER, OLD, f"differs from ci/expected/{COMM}"),
        (OTHER, None, f"exists, but ci/expected/{COMM} does not"),
        (None, OLD, f"was removed, but ci/expected/{COMM} exists"),
    ],
)
def test_accept_refuses_changed_snapshots(artifacts, fsdp_comm, current, expected, change):
    """An old download must not revert a snapshot that somebody has accepted since."""
    for path, text in ((f"snapshots/{COMM}", current), (f"ci/expected/{COMM}", expected)):
        (artifacts / path).unlink()
        if text is not None:
            (artifacts / path).write_text(text)
    done = fsdp_comm("accept", "ci")
    assert (done.status, done.lines[-1]) == (2, "2 files accepted, 1 refused")
    assert done.err == (
        f"fsdp-comm: refused: snapshots/{COMM} {change}: it has changed since the test failed. Run "
        "the tests again with --comm-artifacts, and accept the new files\n"
    )
    assert files(artifacts).get(COMM) == current


@pytest.mark.parametrize(
    "current",
    [
        NEW,  # accepted before
        OLD.replace("\n", "\r\n"),  # as git checked it out
        OLD.replace("pytest-fsdp-comm 2 comm", "pytest-fsdp-comm 2 comm | torch 2.9.0", 1),
    ],
)
def test_accept_ignores_uncompared_differences(artifacts, fsdp_comm, current):
    assert current != OLD
    (artifacts / f"snapshots/{COMM}").write_bytes(current.encode())
    done = fsdp_comm("accept", "ci")
    assert (done.status, done.err) == (0, "")
    assert files(artifacts)[COMM] == NEW


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
