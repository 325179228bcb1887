"""Which snapshot files an update removes, in a project such as users have: the rule's table."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

CONFTEST = """
import pytest
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import Calls, CommProfile, CommRow

class Recorded:
    # As comm_mode, without ranks and torch: what is removed depends on neither.
    def merged_profile(self):
        row = CommRow(
            phase=Phase.FORWARD, owner="a", kind="all_gather", axis="dp",
            calls=(Calls(count=1, nbytes=4),),
        )
        axis = MeshAxis(name="dp", size=2, dims=((2, 1),))
        return CommProfile(world_size=2, mesh_axes=(axis,), rows=(row,), backend="gloo")

@pytest.fixture
def recorded():
    return Recorded()
"""
MODULE_A = """
import pytest

def test_one(recorded, comm_snapshot):
    assert recorded == comm_snapshot
    assert recorded == comm_snapshot(name="second")

@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "large"])
def test_sizes(recorded, comm_snapshot, size):
    assert recorded == comm_snapshot

class TestLlama:
    def test_step(self, recorded, comm_snapshot):
        assert recorded == comm_snapshot

    class TestInner:
        def test_step(self, recorded, comm_snapshot):
            assert recorded == comm_snapshot

def test_plain():
    pass
"""
MODULE_B = """
def test_one(recorded, comm_snapshot):
    assert recorded == comm_snapshot

def test_two(recorded, comm_snapshot):
    assert recorded == comm_snapshot
"""
A = "tests/test_a"
SUB = "tests/sub/test_a"
ONE = {"test_one.ws1", "test_one.ws1.second"}
SIZES = {"test_sizes[small].ws1", "test_sizes[large].ws1"}
CLASSES = {"TestLlama.test_step.ws1", "TestLlama.TestInner.test_step.ws1"}
ALL = {
    *(f"{A}/{name}" for name in ONE | SIZES | CLASSES),
    *(f"{SUB}/{name}.ws1" for name in ("test_one", "test_two")),
    *(f"tests/sub/test_b/{name}.ws1" for name in ("test_one", "test_two")),
}


# Whatever else is installed takes longer to import than a case takes to run.
PLUGINS = ("syrupy", "pytest_fsdp_comm.plugin", "xdist")
PYTEST = [sys.executable, "-m", "pytest", *(f"-p{name}" for name in PLUGINS)]


class Project:
    def __init__(self, path):
        self.path = path

    def write(self, name, text):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def edit(self, name, old, new):
        text = (self.path / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def run(self, *arguments, cwd="."):
        return subprocess.run(
            [*PYTEST, *arguments],
            cwd=self.path / cwd,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def files(self):
        root = self.path / "snapshots"
        return {str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.comm")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("recorded"))
    project.write("pytest.ini", "[pytest]\nmarkers = slow\naddopts = --import-mode=importlib\n")
    project.write("tests/conftest.py", CONFTEST)
    project.write("tests/test_a.py", MODULE_A)
    project.write("tests/sub/test_a.py", MODULE_B)
    project.write("tests/sub/test_b.py", MODULE_B)
    result = project.run("--snapshot-update")
    assert result.returncode == 0, result.stdout
    assert project.files() == ALL
    return project


@pytest.fixture
def project(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    args: str = ""
    edit: tuple = ()
    """(file, old, new), or several."""
    gone: frozenset | set = frozenset()
    """The files that are unused."""
    exit: int = 0
    """Of the update."""
    cwd: str = "."
    then: str = ""
    """Arguments of a run before, to fill caches."""


TEST_A, SUB_A, SUB_B = "tests/test_a.py", "tests/sub/test_a.py", "tests/sub/test_b.py"
ONE_STARTS = "def test_one(recorded, comm_snapshot):"
SECOND = 'assert recorded == comm_snapshot(name="second")'


def first_line(text):
    """As the first line of the first test of the second module."""
    return (SUB_A, ONE_STARTS, f"{ONE_STARTS}\n    {text}")


def before_second(text):
    """Between the two comparisons of a test."""
    return (TEST_A, SECOND, f"{text}\n    {SECOND}")


FAIL_B = (SUB_B, "    assert", "    assert False\n    assert")
NO_ONE = (TEST_A, "def test_one(", "def _one(")
NO_B_TWO = (SUB_B, "def test_two(", "def _two(")
UNNAMED = (TEST_A, f"    {SECOND}\n", "")
NO_TESTS = (SUB_B, "def test_", "def _")
SYNTAX_ERROR = (SUB_B, "def test_two(", "def test_two(]")
ONE_GONE = {f"{A}/{name}" for name in ONE}
B = {"tests/sub/test_b/test_one.ws1", "tests/sub/test_b/test_two.ws1"}
B_TWO_GONE = {"tests/sub/test_b/test_two.ws1"}

CASES = {
    # Selections: nothing goes.
    "all": Case(),
    "node id": Case(args="tests/test_a.py::test_one"),
    "node id in a sub-folder": Case(args="tests/sub/test_b.py::test_two"),
    "node id of the other module of this name": Case(args="tests/sub/test_a.py::test_one"),
    "two node ids": Case(args="tests/test_a.py::test_one tests/sub/test_b.py::test_two"),
    "class": Case(args="tests/test_a.py::TestLlama"),
    "class in a class": Case(args="tests/test_a.py::TestLlama::TestInner"),
    "method": Case(args="tests/test_a.py::TestLlama::test_step"),
    "parameter": Case(args="tests/test_a.py::test_sizes[small]"),
    "function of all parameters": Case(args="tests/test_a.py::test_sizes"),
    "node id and whole directory": Case(args="tests/test_a.py::test_one tests/sub"),
    "module": Case(args="tests/test_a.py"),
    "sub-folder": Case(args="tests/sub"),
    "sub-folder as invocation directory": Case(cwd="tests/sub"),
    "node id from a sub-folder": Case(args="test_b.py::test_one", cwd="tests/sub"),
    "node id above a sub-folder": Case(args="../test_a.py::test_one", cwd="tests/sub"),
    "-k": Case(args="-k test_one"),
    "-k of one class": Case(args="-k TestLlama tests/test_a.py"),
    "-m": Case(args="-m slow"),
    "-m not": Case(args="-m 'not slow'"),
    "--deselect": Case(args="--deselect tests/test_a.py::test_one"),
    "--ignore": Case(args="--ignore tests/sub"),
    "--ignore-glob": Case(args="--ignore-glob *b.py"),
    "--lf": Case(then="", args="--lf", edit=FAIL_B, exit=1),
    "--lf after a failure": Case(then="tests", args="--lf", edit=FAIL_B, exit=1),
    "--ff after a failure": Case(then="tests", args="--ff", edit=FAIL_B, exit=1),
    "--sw after a failure": Case(then="tests --sw", args="--sw", edit=FAIL_B, exit=2),
    "--nf": Case(args="--nf"),
    "--collect-only": Case(args="--collect-only"),
    "--setup-plan": Case(args="--setup-plan"),
    "--setup-only": Case(args="--setup-only"),
    "node id of a test that does not compare": Case(args="tests/test_a.py::test_plain"),
    "--pyargs": Case(args="--pyargs tests.sub.test_b::test_one"),
    "-n 2": Case(args="-n 2"),
    "-n 4": Case(args="-n 4"),
    "node id with -n 2": Case(args="-n 2 tests/test_a.py::test_one"),
    "-k with -n 2": Case(args="-n 2 -k test_one"),
    # Tests that did not come to their end: nothing goes.
    "failure": Case(edit=FAIL_B, exit=1),
    "failure with -n 2": Case(args="-n 2", edit=FAIL_B, exit=1),
    "failure before the second comparison": Case(edit=before_second("assert False"), exit=1),
    "set-up error": Case(edit=(SUB_B, "def test_two(", "def test_two(missing, "), exit=1),
    "skip": Case(edit=(TEST_A, "@pytest.mark.slow", "@pytest.mark.skip")),
    "skip inside": Case(edit=before_second("pytest.skip()")),
    "module skipped": Case(edit=(TEST_A, "\n\ndef", "\npytest.skip(allow_module_level=True)\ndef")),
    "xfail": Case(edit=(TEST_A, "@pytest.mark.slow", "@pytest.mark.xfail(run=False)")),
    "xfail inside": Case(edit=before_second("pytest.xfail()")),
    "syntax error": Case(edit=SYNTAX_ERROR, exit=2),
    "syntax error, going on": Case(
        args="--continue-on-collection-errors", edit=SYNTAX_ERROR, exit=1
    ),
    "-x": Case(args="-x", edit=(TEST_A, "    pass", "    assert False"), exit=1),
    "-x at the first": Case(args="-x", edit=first_line("assert False"), exit=1),
    "--maxfail=1 -n 2": Case(args="--maxfail=1 -n 2", edit=first_line("assert False"), exit=2),
    "pytest.exit": Case(edit=first_line("import pytest; pytest.exit()"), exit=2),
    "pytest.exit with 0": Case(edit=first_line("import pytest; pytest.exit('', 0)")),
    "ini value of the command line": Case(args="-o python_functions=test_two"),
    "ini value that chooses classes": Case(args="-o python_classes=Llama"),
    "a module that is not to be collected": Case(
        edit=(SUB_B, "def test_one", "__test__ = False\n\n\ndef test_one")
    ),
    "no parameters": Case(edit=(TEST_A, '["small", "large"]', "[]")),
    "a worker crashes": Case(args="-n 2", edit=first_line("import os; os._exit(1)"), exit=1),
    "a worker crashes, and a test is gone": Case(
        args="-n 2", edit=(first_line("import os; os._exit(1)"), NO_ONE), exit=1
    ),
    # Told not to.
    "no cleanup": Case(args="--snapshot-no-cleanup", edit=NO_ONE),
    "disabled": Case(args="--snapshot-disable-unused", edit=NO_ONE),
    "new only": Case(args="--snapshot-update-new-only", edit=(NO_ONE, UNNAMED)),
    "new only, node id": Case(args=f"--snapshot-update-new-only {TEST_A}::test_plain"),
    # Tests that are gone, in modules that were collected whole.
    "test gone": Case(edit=NO_ONE, gone=ONE_GONE),
    "test gone, module": Case(args=TEST_A, edit=NO_ONE, gone=ONE_GONE),
    "test gone, folder": Case(args="tests/sub", edit=NO_B_TWO, gone=B_TWO_GONE),
    "test gone, folder of another": Case(args="tests/sub", edit=NO_ONE),
    "test gone, from a sub-folder": Case(cwd="tests/sub", edit=NO_B_TWO, gone=B_TWO_GONE),
    "test gone, -n 2": Case(args="-n 2", edit=NO_ONE, gone=ONE_GONE),
    "test gone, another's node id": Case(args=f"{TEST_A}::test_plain", edit=NO_ONE),
    "test gone, node id of the only other": Case(args=f"{SUB_B}::test_one", edit=NO_B_TWO),
    "test gone, -k": Case(args="-k test_", edit=NO_ONE),
    "test gone, another fails": Case(edit=(NO_ONE, FAIL_B), exit=1, gone=ONE_GONE),
    "test gone, another deselected": Case(args=f"--deselect {TEST_A}::test_plain", edit=NO_ONE),
    "class gone": Case(
        edit=(TEST_A, "class TestLlama", "class Llama"), gone={f"{A}/{name}" for name in CLASSES}
    ),
    "parameter gone": Case(edit=(TEST_A, ', "large"', ""), gone={f"{A}/test_sizes[large].ws1"}),
    "all tests of a module gone": Case(edit=NO_TESTS, gone=B),
    "all tests of a module gone, -k": Case(args="-k TestLlama", edit=NO_TESTS),
    # Comparisons that are gone, in tests that passed.
    "comparison gone": Case(edit=UNNAMED, gone={f"{A}/test_one.ws1.second"}),
    "comparison gone, node id": Case(
        args=f"{TEST_A}::test_one", edit=UNNAMED, gone={f"{A}/test_one.ws1.second"}
    ),
    "comparison gone, another's node id": Case(args=f"{TEST_A}::test_plain", edit=UNNAMED),
    "comparison gone, but its test fails": Case(edit=(TEST_A, SECOND, "assert False"), exit=1),
}


def prepare(project, case):
    edits = case.edit if case.edit and isinstance(case.edit[0], tuple) else (case.edit,)
    for edit in filter(None, edits):
        project.edit(*edit)
    if case.then:
        project.run(*case.then.split())


def arguments(case):
    return shlex.split(case.args)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_an_update_removes_what_no_test_needs_and_nothing_else(project, case):
    prepare(project, case)
    before = {name: (project.path / f"snapshots/{name}.comm").read_bytes() for name in ALL}
    result = project.run("--snapshot-update", *arguments(case), cwd=case.cwd)
    assert result.returncode == case.exit, result.stdout + result.stderr
    assert ALL - project.files() == case.gone, result.stdout
    assert "INTERNALERROR" not in result.stdout
    for name in project.files():
        assert (project.path / f"snapshots/{name}.comm").read_bytes() == before[name]
    count = len(case.gone)
    told = f"{count} snapshot file{'s' if count > 1 else ''} deleted:"
    assert (told in result.stdout) == bool(case.gone)
    for name in case.gone:
        assert f"  snapshots/{name}.comm: " in result.stdout


ALSO_TOLD = {
    *("all", "node id", "node id in a sub-folder", "class", "parameter", "-k", "-n 2"),
    *("no cleanup", "disabled"),
}
UNUSED = {name: case for name, case in CASES.items() if case.gone or name in ALSO_TOLD}


@pytest.mark.parametrize("case", UNUSED.values(), ids=list(UNUSED))
def test_a_run_without_an_update_tells_the_same_files(project, case):
    prepare(project, case)
    result = project.run(*arguments(case), cwd=case.cwd)
    disabled = "--snapshot-disable-unused" in case.args
    # What nothing removes is still told.
    gone = ONE_GONE if "no-cleanup" in case.args else case.gone
    assert result.returncode == (1 if gone else case.exit), result.stdout + result.stderr
    assert ("unused:" in result.stdout) == bool(gone)
    for name in gone:
        assert f"  snapshots/{name}.comm: " in result.stdout
    assert ("detection is disabled" in result.stdout) == disabled
    assert project.files() == ALL


# Modules that are gone: only a full run can tell.


@pytest.mark.parametrize(
    ("args", "cwd", "gone"),
    [
        ("", ".", B),
        ("tests", ".", B),
        ("-n 2", ".", B),
        (".", ".", B),
        ("tests/sub tests/test_a.py", ".", set()),
        ("tests/sub", ".", set()),
        ("", "tests/sub", set()),
        ("tests/test_a.py", ".", set()),
        ("tests tests/test_a.py::test_one", ".", set()),
        ("-k test_", ".", set()),
        ("-m 'not slow'", ".", set()),
        ("--deselect tests/test_a.py::test_one", ".", set()),
        ("--ignore tests/sub", ".", set()),
        ("--lf", ".", B),
        ("--collect-only", ".", set()),
        ("-x --maxfail=1", ".", B),
    ],
)
def test_only_a_full_run_removes_the_snapshots_of_a_deleted_module(project, args, cwd, gone):
    (project.path / "tests/sub/test_b.py").unlink()
    result = project.run(*shlex.split(args), cwd=cwd)
    assert result.returncode == (1 if gone else 0), result.stdout
    for name in gone:
        reason = "tests/sub/test_b.py no longer exists"
        assert f"  snapshots/{name}.comm: {reason}" in result.stdout
    assert project.files() == ALL
    result = project.run("--snapshot-update", *shlex.split(args), cwd=cwd)
    assert result.returncode == 0
    assert ALL - project.files() == gone
    assert (project.path / "snapshots/tests/sub/test_b").is_dir() == (not gone)


def test_a_deleted_module_is_cleaned_up_unless_the_run_stopped_early(project):
    (project.path / "tests/sub/test_b.py").unlink()
    project.edit(
        "tests/test_a.py", "def test_plain():", "def test_plain():\n    raise RuntimeError"
    )
    assert project.run("--snapshot-update", "-x").returncode == 1
    assert project.files() == ALL
    assert project.run("--snapshot-update").returncode == 1
    assert project.files() == ALL - B


def test_a_module_that_was_renamed_takes_its_snapshots_along_by_one_full_update(project):
    (project.path / "tests/sub/test_b.py").rename(project.path / "tests/sub/test_c.py")
    result = project.run("--snapshot-update")
    assert result.returncode == 0
    assert project.files() == ALL - B | {name.replace("test_b", "test_c") for name in B}


def test_a_module_of_another_kind_is_not_gone(project):
    (project.path / "tests/sub/test_b.py").rename(project.path / "tests/sub/test_b.ipynb")
    assert project.run("--snapshot-update").returncode == 0
    assert project.files() == ALL


def test_a_module_that_is_not_collected_is_not_gone(project):
    project.write("tests/conftest.py", CONFTEST + "\ncollect_ignore = ['sub/test_b.py']\n")
    assert project.run("--snapshot-update").returncode == 0
    assert project.files() == ALL


def test_projects_that_share_a_directory_above_keep_each_other_s_files(tmp_path):
    for name in ("one", "two"):
        project = Project(tmp_path / name)
        project.write("pytest.ini", "[pytest]\nfsdp_comm_snapshot_dir = ../reviewed\n")
        project.write("tests/conftest.py", CONFTEST)
        project.write("tests/test_a.py", MODULE_B)
        assert project.run("--snapshot-update").returncode == 0
    reviewed = tmp_path / "reviewed"
    files = sorted(str(file.relative_to(reviewed)) for file in reviewed.rglob("*.comm"))
    assert files == [
        "one/tests/test_a/test_one.ws1.comm",
        "one/tests/test_a/test_two.ws1.comm",
        "two/tests/test_a/test_one.ws1.comm",
        "two/tests/test_a/test_two.ws1.comm",
    ]
    assert Project(tmp_path / "one").run("--snapshot-update").returncode == 0
    assert len(list(reviewed.rglob("*.comm"))) == 4


def test_two_modules_of_one_name_outside_the_root_directory_do_not_share_a_file(tmp_path):
    project = Project(tmp_path)
    project.write("elsewhere/pytest.ini", "[pytest]\naddopts = --import-mode=importlib\n")
    for name in ("one", "two"):
        project.write(f"{name}/conftest.py", CONFTEST)
        project.write(f"{name}/test_a.py", MODULE_B)
    arguments = ("-c", "elsewhere/pytest.ini", "one", "two")
    result = project.run("--snapshot-update", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    root = tmp_path / "elsewhere" / "snapshots"
    assert sorted(str(file.relative_to(root)) for file in root.rglob("*.comm")) == [
        f"%2E%2E/{module}/test_a/{test}.ws1.comm"
        for module in ("one", "two")
        for test in ("test_one", "test_two")
    ]
    assert project.run(*arguments).returncode == 0


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "xdist"])
def test_an_interrupted_update_removes_nothing(project, arguments):
    project.edit(*NO_B_TWO)
    project.edit(TEST_A, "    pass", "    import time; open('at', 'w'); time.sleep(30)")
    process = subprocess.Popen(
        [*PYTEST, "--snapshot-update", *arguments],
        cwd=project.path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    deadline = time.monotonic() + 60
    while not (project.path / "at").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output
    assert project.files() == ALL


def test_syrupy_s_own_directory_is_refused(project):
    project.write("pytest.ini", "[pytest]\nfsdp_comm_snapshot_dir = tests/__snapshots__\n")
    result = project.run("--snapshot-update")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "ini fsdp_comm_snapshot_dir: '__snapshots__' is where syrupy keeps the files of plain "
        "`snapshot` assertions and deletes files that it does not know; choose another "
        "directory, e.g. 'snapshots'" in result.stderr
    )


def test_what_a_hook_leaves_out_is_still_there(project):
    project.write(
        "tests/sub/conftest.py",
        "def pytest_pycollect_makeitem(name):\n    return [] if name == 'test_two' else None\n",
    )
    assert project.run("--snapshot-update").returncode == 0
    assert project.run().returncode == 0
    assert project.files() == ALL


@pytest.mark.parametrize("leave", ["pytest.skip('')", "pytest.xfail('')"])
def test_a_test_of_which_a_subtest_did_not_run_to_its_end_loses_nothing(tmp_path, leave):
    pytest.importorskip("_pytest.subtests")
    project = Project(tmp_path)
    project.write("conftest.py", CONFTEST)
    source = (
        "import pytest\n\ndef test_a(subtests, recorded, comm_snapshot):\n"
        "    for i in range(3):\n        with subtests.test(i=i):\n"
        "            if i == 1: LEAVE\n"
        "            assert recorded == comm_snapshot(name=f's{i}')\n"
    )
    project.write("test_s.py", source.replace("LEAVE", "pass"))
    assert project.run("--snapshot-update").returncode == 0
    before = project.files()
    assert len(before) == 3
    project.write("test_s.py", source.replace("LEAVE", leave))
    assert project.run().returncode == 0
    assert project.run("--snapshot-update").returncode == 0
    assert project.files() == before


def test_parameters_that_follow_the_world_size_keep_the_files_of_the_other(tmp_path):
    project = Project(tmp_path)
    project.write(
        "conftest.py",
        CONFTEST
        + """
def pytest_generate_tests(metafunc):
    if "tp" in metafunc.fixturenames:
        ranks = int(metafunc.config.getoption("--world-size"))
        metafunc.parametrize("tp", [size for size in (1, 2, 3) if size <= ranks])
""",
    )
    project.write(
        "test_n.py",
        "import pytest\n@pytest.mark.distributed\n"
        "def test_t(tp, recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
        "@pytest.mark.distributed\n"
        "def test_u(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n",
    )
    for size in ("3", "2"):
        assert project.run("--snapshot-update", "--world-size", size).returncode == 0
    assert len(project.files()) == 4 + 3
    project.edit("test_n.py", "def test_u", "def _u")
    result = project.run("--snapshot-update", "--world-size", "2")
    assert "1 snapshot file deleted:" in result.stdout
    assert project.files() >= {"test_n/test_t[3].ws3", "test_n/test_u.ws3"}


def test_foreign_files_stay(project):
    for name in ("README.txt", "notes.comm", "test_gone.comm"):
        project.write(f"snapshots/tests/test_a/{name}", "mine")
    before = {file for file in project.path.rglob("*") if "__pycache__" not in file.parts}
    assert project.run("--snapshot-update").returncode == 0
    assert before <= set(project.path.rglob("*"))
