"""What ``fsdp-comm accept`` writes, and what it refuses."""

import pytest
import sample_profiles
from sample_files import TREE

from pytest_fsdp_comm.command_line import accept as accepting
from pytest_fsdp_comm.command_line.accept import accept, ask_on_terminal
from pytest_fsdp_comm.command_line.terminal import Printer
from pytest_fsdp_comm.snapshots.comm_text import format_profile

OLD, NEW, OTHER = (format_profile(sample_profiles.profile(layers=layers)) for layers in (3, 4, 5))
TREE4 = TREE
TREE = TREE4.replace("world_size 4\nmesh dp=4", "world_size 8\nmesh dp=8")
FROZEN = TREE.replace("float32[8] dp", "float32[8] frozen dp")
COMM, ADDED = "test_a/test_x.ws8.comm", "test_b/test_y.ws8.comm"
FILES = {COMM: (OLD, NEW), "test_a/test_x.ws8.tree.comm": (TREE, FROZEN), ADDED: (None, NEW)}


@pytest.fixture
def artifacts(write, project):
    write("test_a.py", "def test_x(): ...\n")
    write("test_b.py", "if GPU:\n    class TestY:\n        ...\nfrom cases import *\n")
    for path, (old, new) in FILES.items():
        write(f"ci/received/{path}", new)
        if old is not None:
            write(f"ci/expected/{path}", old)
            write(f"snapshots/{path}", old)
    return project


def files(project):
    root = project / "snapshots"
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*.comm")}


def test_every_change_is_shown_and_with_yes_accepted(artifacts, fsdp_comm):
    before = files(artifacts)
    seen = fsdp_comm("accept", "ci")
    assert seen.status == 2
    assert "there is no terminal to ask on; --yes accepts all that is shown above" in seen.err
    assert files(artifacts) == before
    done = fsdp_comm("accept", "ci", "--yes")
    assert done.status == 0
    assert files(artifacts) == {path: new for path, (_, new) in FILES.items()}
    assert done.lines[-1] == "3 files accepted"
    for lines in (seen.lines, done.lines):
        assert lines[0] == "snapshots/test_a/test_x.ws8.comm:"
        assert lines[1].startswith("  +30 % bytes in all")
        assert "snapshots/test_b/test_y.ws8.comm: added" in lines
        # Each says what it does, before it is asked for.
        assert [line for line in lines if line.startswith("  accepting")] == [
            "  accepting overwrites snapshots/test_a/test_x.ws8.comm",
            "  accepting overwrites snapshots/test_a/test_x.ws8.tree.comm",
            "  accepting adds snapshots/test_b/test_y.ws8.comm",
        ]
    again = fsdp_comm("accept", "ci", "--yes")
    assert (again.status, again.lines) == (0, ["0 files accepted"])


@pytest.mark.parametrize(
    ("answers", "accepted"),
    [
        (["no", "yes"], [ADDED]),
        (["quit"], []),
        (["all"], [*FILES]),
        (["yes", "quit"], [*FILES][:2]),
    ],
)
def test_the_user_decides_once_per_test_about_all_of_its_files(
    artifacts, answers, accepted, capsys
):
    given = iter(answers)
    done = accept(
        artifacts / "ci",
        artifacts / "snapshots",
        Printer("never"),
        anchor=artifacts,
        ask=lambda: next(given),
    )
    now = files(artifacts)
    assert [path for path, (_, new) in FILES.items() if now.get(path) == new] == accepted
    assert (done.written, done.skipped) == (len(accepted), len(FILES) - len(accepted))
    assert next(given, None) is None
    assert capsys.readouterr().out


def test_the_question_repeats_until_it_gets_a_valid_answer(monkeypatch):
    given = iter(["what", "", "S"])
    monkeypatch.setattr("builtins.input", lambda _: next(given))
    assert ask_on_terminal() == "no"

    def end(question):
        assert question == accepting.QUESTION
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert ask_on_terminal() == "quit"


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (f"snapshots/{COMM}", OTHER, "is not the file that CI compared with"),
        (f"snapshots/{COMM}", None, "which is not here"),
        (f"snapshots/{ADDED}", OTHER, "there is a snapshots/test_b/test_y.ws8.comm now"),
        (f"ci/received/{COMM}", NEW[:-4], "ci/received/test_a/test_x.ws8.comm, line "),
        (f"ci/expected/{COMM}", b"\xff", "ci/expected/test_a/test_x.ws8.comm, line 1"),
        (f"snapshots/{COMM}", f"<<<<<<< ours\n{OLD}", "a marker of a merge conflict"),
    ],
)
def test_a_file_that_ci_compared_with_another_base_is_refused_and_the_rest_accepted(  # noqa: PLR0917  # fixtures
    artifacts, write, fsdp_comm, path, content, said
):
    if content is None:
        (artifacts / path).unlink()
    else:
        write(path, content)
    before = files(artifacts)
    done = fsdp_comm("accept", "ci", "--yes")
    assert done.status == 1
    assert said in done.out
    assert done.lines[-1] == "2 files accepted, 1 refused"
    refused = ADDED if "test_b" in path else COMM
    assert files(artifacts).get(refused) == before.get(refused)


def test_a_recording_of_some_ranks_never_replaces_one_of_all(artifacts, write, fsdp_comm):
    (artifacts / f"ci/received/{COMM}").unlink()
    write(f"ci/received/{COMM}", NEW.replace("world_size 8\n", "world_size 8\nranks 0,3\n"))
    done = fsdp_comm("accept", "ci", "--yes")
    assert (
        f"snapshots/{COMM} was recorded on ranks that CI did not run: on all 8 ranks, and CI "
        "recorded ranks 0, 3. A recording never replaces one of further ranks: run CI on all of "
        "them, without --comm-backend fake" in done.out
    )
    assert done.lines[-1] == "2 files accepted, 1 refused"
    assert files(artifacts)[COMM] == OLD


def test_line_ends_and_the_first_line_make_no_other_file(artifacts, write, fsdp_comm):
    write(
        f"snapshots/{COMM}", OLD.replace("| torch ,", "| torch 9,").replace("\n", "\r\n").encode()
    )
    assert fsdp_comm("accept", "ci", "--yes").status == 0
    assert files(artifacts)[COMM] == NEW


def test_nothing_outside_of_the_snapshots_is_written(artifacts, write, fsdp_comm):
    outside = artifacts / "outside"
    outside.mkdir()
    (artifacts / "snapshots/test_b").symlink_to(outside)
    (artifacts / f"snapshots/{COMM}").unlink()
    write("outside.comm", OLD)
    (artifacts / f"snapshots/{COMM}").symlink_to(artifacts / "outside.comm")
    done = fsdp_comm("accept", "ci", "--yes")
    assert done.lines[-1] == "1 file accepted, 2 refused"
    assert "only snapshots are written" in done.out
    assert list(outside.iterdir()) == []
    assert (artifacts / "outside.comm").read_text() == OLD
    # What artifacts link to is not read.
    (artifacts / f"ci/received/{COMM}").unlink()
    (artifacts / f"ci/received/{COMM}").symlink_to(artifacts / "outside.comm")
    assert "is no plain file; nothing was accepted" in fsdp_comm("accept", "ci", "--yes").err


def test_the_directory_of_snapshots_is_that_of_pytest_s_settings(artifacts, write, fsdp_comm):
    (artifacts / "snapshots").rename(artifacts / "reviewed")
    assert fsdp_comm("accept", "ci", "--yes", "--snapshots", "reviewed").status == 0
    for path, (old, _) in FILES.items():
        if old is not None:
            write(f"reviewed/{path}", old)
    (artifacts / f"reviewed/{ADDED}").unlink()
    write("pytest.ini", "[pytest]\nfsdp_comm_snapshot_dir = reviewed\n")
    assert fsdp_comm("accept", "ci", "--yes").status == 0
    assert (artifacts / "reviewed" / COMM).read_text() == NEW
    assert not (artifacts / "snapshots").exists()
    wrong = fsdp_comm("accept", "ci", "--yes", "--snapshots", "nope")
    assert "there is no directory nope" in wrong.err
    # As from a directory above the project.
    write("pytest.ini", "[pytest]\n")
    assert "there is no directory snapshots" in fsdp_comm("accept", "ci", "--yes").err
    assert not (artifacts / "snapshots").exists()


def test_a_directory_without_artifacts_is_an_error(project, fsdp_comm):
    (project / "snapshots").mkdir()
    done = fsdp_comm("accept", "nope")
    assert done.status == 2
    assert "has no directory 'received'" in done.err


REFUSED = {
    "a tree for a comm file": (
        COMM,
        FROZEN,
        f"snapshots/{COMM} is a comm snapshot, and CI received a tree snapshot. If the test "
        "compares another value now, record it here: pytest --snapshot-update with its name",
    ),
    "a comm file for a tree": (
        "test_a/test_x.ws8.tree.comm",
        NEW,
        "is a tree snapshot, and CI received a comm snapshot",
    ),
    "another world size": (
        "test_a/test_x.ws4.comm",
        NEW,
        "expected a recording of 4 ranks, as snapshots/test_a/test_x.ws4.comm is one, and CI "
        "received one of 8. Accept the directory as CI left it, or run CI again",
    ),
    "a module that is not there": (
        "test_gone/test_x.ws8.comm",
        NEW,
        "expected its test in test_gone.py, which does not exist. Check out the commit that CI "
        "ran, or run this in the directory of the project",
    ),
    "a module above that is not there": (
        "%2E%2E/o/test_gone/test_x.ws8.comm",
        NEW,
        "o/test_gone.py",
    ),
    "no module": ("test_x.ws8.comm", NEW, "which does not exist"),
    "a test that is not there": (
        "test_a/TestZ.test_%C3%A9[1].ws8.comm",
        NEW,
        "expected TestZ.test_é in test_a.py, which defines no test of that name under any "
        "condition. Check out the commit that CI ran",
    ),
    "a name that steers a terminal": (
        "test_a/test_%1B[1].ws8.comm",
        NEW,
        "expected test_%1B in test_a.py, which defines no test",
    ),
    "no name of a snapshot": (
        "test_a/notes.comm",
        NEW,
        "expected the name of a snapshot, <test>.ws<ranks>[.<name>].comm. Accept the directory",
    ),
}


@pytest.mark.parametrize(("path", "text", "said"), REFUSED.values(), ids=list(REFUSED))
def test_another_kind_or_world_size_is_refused_and_the_rest_accepted(  # noqa: PLR0917  # fixtures
    artifacts, write, fsdp_comm, path, text, said
):
    write(f"ci/received/{path}", text)
    before = files(artifacts)
    done = fsdp_comm("accept", "ci", "--yes")
    assert said in done.out
    assert f"{path}: refused" in done.lines
    accepted = [name for name in FILES if name != path]
    assert (done.status, done.lines[-1]) == (1, f"{len(accepted)} files accepted, 1 refused")
    now = files(artifacts)
    assert now == before | {name: FILES[name][1] for name in accepted}


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("test_c.ipynb", "test_c.ipynb/cell.ws8.comm"),
        ("test_c.so", "test_c/test_x.ws8.comm"),
        ("test_c.py", "test_c/TestC.test_x[1].ws8.comm"),
        ("../over/test_c.py", "%2E%2E/over/test_c/TestC.test_x.ws8.second.comm"),
    ],
)
def test_a_test_that_a_branch_may_define_is_accepted(artifacts, write, fsdp_comm, module, path):
    write(module, "if GPU:\n    class TestC(cases.Base): ...\n")
    write(f"ci/received/{path}", NEW)
    assert fsdp_comm("accept", "ci", "--yes").lines[-1] == "4 files accepted"
    assert files(artifacts)[path] == NEW


@pytest.mark.usefixtures("artifacts")
def test_a_test_without_ranks_may_record_a_group_of_its_own(write, fsdp_comm):
    path = "test_a/test_x.ws1.comm"
    write(f"ci/received/{path}", NEW)
    assert fsdp_comm("accept", "ci", "--yes").lines[-1] == "4 files accepted"
    write(f"ci/received/{path}", TREE4)
    write(f"snapshots/{path}", TREE)
    write(f"ci/expected/{path}", TREE)
    done = fsdp_comm("accept", "ci", "--yes")
    assert "expected a recording of 8 ranks, as snapshots/" in done.out


def test_links_in_artifacts_are_not_followed(artifacts, write, fsdp_comm):
    expected = write("elsewhere.comm", OLD)
    (artifacts / f"ci/expected/{COMM}").unlink()
    (artifacts / f"ci/expected/{COMM}").symlink_to(expected)
    done = fsdp_comm("accept", "ci", "--yes")
    assert f"ci/expected/{COMM} is reached by a link, to {expected}; expected a file" in done.out
    assert done.lines[-1] == "2 files accepted, 1 refused"
    assert files(artifacts)[COMM] == OLD
    (artifacts / "ci").rename(artifacts / "of-ci")
    (artifacts / "ci").mkdir()
    (artifacts / "ci/received").symlink_to(artifacts / "of-ci/received")
    done = fsdp_comm("accept", "ci", "--yes")
    assert (done.status, done.out) == (2, "")
    assert f"ci/received is a link to {artifacts}/of-ci/received; expected the direc" in done.err
    assert files(artifacts)[COMM] == OLD
    # What the user names may be a link.
    (artifacts / "ci/received").unlink()
    (artifacts / "ci").rmdir()
    (artifacts / "ci").symlink_to("of-ci")
    (artifacts / f"ci/expected/{COMM}").unlink()
    write(f"ci/expected/{COMM}", OLD)
    assert fsdp_comm("accept", "ci", "--yes").status == 0


def test_two_names_of_one_file_cannot_overwrite_each_other(artifacts, write, fsdp_comm):
    write("test_c.py", "def test_x(): ...\n")
    (artifacts / "snapshots/test_c").symlink_to("test_a")
    write("ci/received/test_c/test_x.ws8.comm", NEW)
    write("ci/expected/test_c/test_x.ws8.comm", OLD)
    done = fsdp_comm("accept", "ci")
    effect = "  accepting overwrites snapshots/test_c/test_x.ws8.comm, a link to "
    assert f"{effect}snapshots/{COMM}" in done.lines
    write("ci/received/test_c/test_x.ws8.comm", OTHER)
    done = fsdp_comm("accept", "ci", "--yes")
    assert f"another file that CI received goes to snapshots/{COMM} too, by a link" in done.out
    assert done.lines[-1] == "3 files accepted, 1 refused"
    assert files(artifacts)[COMM] == NEW


def test_a_file_that_cannot_be_written_is_named_and_the_rest_accepted(
    artifacts, fsdp_comm, monkeypatch
):
    write_all = accepting.write_atomically

    def write_some(path, text):
        if path.name.endswith(".tree.comm"):
            raise OSError(28, "No space left on device")
        write_all(path, text)

    monkeypatch.setattr(accepting, "write_atomically", write_some)
    done = fsdp_comm("accept", "ci", "--yes")
    assert "cannot write snapshots/test_a/test_x.ws8.tree.comm (No space left on dev" in done.out
    assert (done.status, done.lines[-1]) == (1, "2 files accepted, 1 refused")
    assert files(artifacts)["test_a/test_x.ws8.tree.comm"] == TREE


@pytest.mark.usefixtures("artifacts")
def test_a_broken_file_is_refused_for_its_broken_line_even_if_it_is_out_of_date(write, fsdp_comm):
    write(f"ci/received/{COMM}", NEW.replace("total all_gather", "total broadcast"))
    write(f"snapshots/{COMM}", OTHER)
    done = fsdp_comm("accept", "ci", "--yes")
    assert done.status == 1
    assert f"{COMM}: refused" in done.lines
    assert any(line.startswith(f"  ci/received/{COMM}, line ") for line in done.lines)
    assert "is not the file that CI compared with" not in done.out
