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
import running

CONFTEST = """
import pytest
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.profile import CommProfile, Row

class Recorded:
    # As comm_mode, without ranks and torch: what is removed depends on neither.
    def merged_profile(self):
        row = Row(
            phase=Phase.FORWARD, owner="a", what="all_gather", axis="dp",
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
PYTEST = ["-m", "pytest", *(f"-p{name}" for name in PLUGINS)]


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
            [running.PYTHON, *PYTEST, *arguments],
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
NO_LARGE = (TEST_A, ', "large"', "")
STAR_IMPORT = (TEST_A, "import pytest\n", "import pytest\nfrom os.path import *\n")

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
    "test gone, beside another's node id": Case(args=f"{TEST_A} {SUB_B}::test_one", edit=NO_ONE),
    "test gone, -k": Case(args="-k test_", edit=NO_ONE),
    "test gone, another fails": Case(edit=(NO_ONE, FAIL_B), exit=1, gone=ONE_GONE),
    "test gone, another deselected": Case(args=f"--deselect {TEST_A}::test_plain", edit=NO_ONE),
    "class gone": Case(
        edit=(TEST_A, "class TestLlama", "class Llama"), gone={f"{A}/{name}" for name in CLASSES}
    ),
    "method gone, another class has it": Case(
        edit=(TEST_A, "class TestLlama:\n    def test_", "class TestLlama:\n    def _"),
        gone={f"{A}/TestLlama.test_step.ws1"},
    ),
    "parameter gone": Case(edit=NO_LARGE, gone={f"{A}/test_sizes[large].ws1"}),
    "parameter gone, -n 2": Case(args="-n 2", edit=NO_LARGE, gone={f"{A}/test_sizes[large].ws1"}),
    # What a branch that was not taken may define: nothing goes.
    "test gone, star import": Case(edit=(NO_ONE, STAR_IMPORT)),
    "test gone, star import, -n 2": Case(args="-n 2", edit=(NO_ONE, STAR_IMPORT)),
    "parameter gone, star import": Case(edit=(NO_LARGE, STAR_IMPORT)),
    "parameter gone by a condition": Case(
        edit=(TEST_A, '"large"]', '*(["large"] if pytest.__file__ == "" else [])]')
    ),
    "class gone by a condition": Case(
        edit=(TEST_A, "class TestLlama:", "class TestLlama(pytest.Llama if 0 else object):"),
    ),
    "method gone, unknown base class": Case(
        edit=(
            (TEST_A, "class TestLlama:\n    def test_", "class TestLlama:\n    def _"),
            (TEST_A, "class TestLlama:", "class TestLlama(pytest.Llama if 0 else object):"),
        ),
    ),
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
def test_a_run_without_an_update_lists_the_same_files(project, case):
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
        [sys.executable, *PYTEST, "--snapshot-update", *arguments],
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
def test_a_test_with_an_unfinished_subtest_loses_nothing(tmp_path, leave):
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


# Tests that only another machine has.

CASES_MODULE = """
import os

class Base:
    def test_base(self, recorded, comm_snapshot):
        assert recorded == comm_snapshot

if os.environ.get("GPU"):
    def test_case(recorded, comm_snapshot):
        assert recorded == comm_snapshot
"""
STAR = "from cases import *"
CONDITIONAL = {
    "star import": (f"if GPU:\n    {STAR}", "test_case", f"tests/test_c.py, line 6 ({STAR})"),
    "base class": (
        "import cases\nclass TestA(cases.Base if GPU else object): pass",
        "TestA.test_base",
        "tests/test_c.py, line 6 (base class of TestA: cases.Base if GPU else object)",
    ),
    "generated": (
        "for name in ('x',) if GPU else ():\n    globals()[f'test_{name}'] = test_plain",
        "test_x",
        "tests/test_c.py, line 6 (globals())",
    ),
    "parameters": (
        "@pytest.mark.parametrize('x', [1, 2] if GPU else [1])\n"
        "def test_x(recorded, comm_snapshot, x):\n    assert recorded == comm_snapshot",
        "test_x[2]",
        "tests/test_c.py, line 5 (pytest.mark.parametrize('x', [1, 2] if GPU else [1]))",
    ),
    "subclass": (
        "import cases\nif GPU:\n    class TestA(cases.Base): pass",
        "TestA.test_base",
        "tests/test_c.py, line 7 (base class of TestA: cases.Base)",
    ),
    "import": ("if GPU:\n    from cases import test_case", "test_case", ""),
    "definition": ("if GPU:\n    test_x = test_plain", "test_x", ""),
}


@pytest.mark.parametrize(("source", "test", "told"), CONDITIONAL.values(), ids=list(CONDITIONAL))
def test_what_another_branch_may_define_stays_and_is_named(
    tmp_path, monkeypatch, source, test, told
):
    project = Project(tmp_path)
    project.write("pytest.ini", "[pytest]\npythonpath = .\n")
    project.write("cases.py", CASES_MODULE)
    project.write("tests/conftest.py", CONFTEST)
    plain = "def test_plain(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
    head = "import os, pytest\nGPU = os.environ.get('GPU')\n"
    project.write("tests/test_c.py", f"{head}{plain}{source}\n")
    monkeypatch.setenv("GPU", "1")
    assert project.run("--snapshot-update").returncode == 0
    before = project.files()
    assert f"tests/test_c/{test}.ws1" in before
    monkeypatch.delenv("GPU")
    for arguments in ((), ("-v",), ("--snapshot-update",), ("--snapshot-update", "-n", "2")):
        result = project.run(*arguments)
        assert result.returncode == 0, result.stdout
        assert project.files() == before
        # A run that removes nothing says so where it is asked for more.
        is_told = bool(told and arguments)
        assert ("communication snapshots that stay" in result.stdout) == is_told
        assert (
            "1 snapshot file not deleted: a branch that this run did not take may define the test, "
            f"by\n  snapshots/tests/test_c/{test}.ws1.comm: {told}\n"
            "Delete by hand what belongs to tests that are gone.\n" in result.stdout
        ) == is_told
    # In part, nothing is known, and nothing said.
    result = project.run("--snapshot-update", "tests/test_c.py::test_plain")
    assert "that stay" not in result.stdout
    assert project.files() == before


# One file has one name.


def link(project, name, target):
    path = project.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def two_modules(tmp_path):
    project = Project(tmp_path / "project")
    project.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib\n")
    project.write("tests/conftest.py", CONFTEST)
    for module in ("test_a", "test_b"):
        name = module.replace("test", "test_of")
        project.write(f"tests/{module}.py", MODULE_B.replace("test_two", name))
    return project


@pytest.mark.parametrize("edited", [False, True], ids=["as it was", "tests deleted"])
def test_no_file_that_a_link_leads_to_is_removed(tmp_path, edited):
    project = two_modules(tmp_path)
    (project.path / "snapshots/tests/test_a").mkdir(parents=True)
    link(project, "snapshots/tests/test_b", "test_a")
    for module in ("test_a", "test_b"):
        # Each alone: what the other module's tests need is in the same directory.
        result = project.run("--snapshot-update", f"tests/{module}.py")
        assert result.returncode == 0, result.stdout + result.stderr
    place = "tests/test_a"
    every = {f"{place}/{name}.ws1" for name in ("test_one", "test_of_a", "test_of_b")}
    assert project.files() == every
    if edited:
        project.edit("tests/test_a.py", "def test_of_a", "def _of_a")
        project.edit("tests/test_b.py", "def test_of_b", "def _of_b")
    for arguments in ((), ("tests/test_b.py",), ("--snapshot-update",)):
        result = project.run(*arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "unused" not in result.stdout
    (project.path / "tests/test_b.py").unlink()
    assert project.run("--snapshot-update").returncode == 0
    assert project.files() == every
    assert (project.path / "snapshots/tests/test_b").is_symlink()


def test_a_linked_file_and_what_it_leads_to_stay(tmp_path):
    project = two_modules(tmp_path)
    assert project.run("--snapshot-update").returncode == 0
    place = project.path / "snapshots/tests"
    (place / "test_b/test_of_b.ws1.comm").rename(place / "test_a/test_of_b.ws1.comm")
    link(project, "snapshots/tests/test_b/test_of_b.ws1.comm", "../test_a/test_of_b.ws1.comm")
    before = project.files()
    for arguments in ((), ("--snapshot-update",), ("--snapshot-update", "tests/test_a.py")):
        assert project.run(*arguments).returncode == 0
        assert project.files() == before
    assert (place / "test_b/test_of_b.ws1.comm").is_symlink()


def test_a_linked_snapshot_directory_loses_what_no_test_needs_and_nothing_outside_of_it(tmp_path):
    project = two_modules(tmp_path)
    (tmp_path / "reviewed").mkdir()
    (tmp_path / "elsewhere").mkdir()
    link(project, "snapshots", "../reviewed")
    link(Project(tmp_path), "reviewed/tests/test_b", "../../elsewhere")
    assert project.run("--snapshot-update").returncode == 0
    for module, name in (("test_a", "of_a"), ("test_b", "of_b")):
        project.edit(f"tests/{module}.py", f"def test_{name}", f"def _{name}")
    result = project.run("--snapshot-update")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "  snapshots/tests/test_a/test_of_a.ws1.comm: its test no longer" in result.stdout
    files = [path.name for path in sorted((tmp_path / "reviewed").rglob("*.comm"))]
    assert files == ["test_one.ws1.comm"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
    # The directory is emptied, and the link stays.
    (project.path / "tests/test_a.py").unlink()
    assert project.run("--snapshot-update").returncode == 0
    assert [path.name for path in (tmp_path / "reviewed/tests").iterdir()] == ["test_b"]
    assert (project.path / "snapshots").is_symlink()


def test_a_project_that_links_lead_to_has_its_own_files(tmp_path):
    project = two_modules(tmp_path)
    project.write(
        "pytest.ini",
        "[pytest]\naddopts = --import-mode=importlib\nfsdp_comm_snapshot_dir = ../reviewed\n",
    )
    assert project.run("--snapshot-update").returncode == 0
    (tmp_path / "other").mkdir()
    outside = tmp_path.with_name(f"{tmp_path.name}-link")
    outside.symlink_to(project.path)
    project.edit("tests/test_a.py", "def test_of_a", "def _of_a")
    ini, root = str(project.path / "pytest.ini"), f"--rootdir={outside}"
    for arguments in (
        (root,),
        (str(outside),),
        ("-c", ini, str(outside / "tests")),
        ("-n", "2", root),
        ("-c", ini, str(outside / "tests/test_b.py::test_one")),
    ):
        result = project.run(*arguments, cwd="../other" if arguments[0] == str(outside) else ".")
        whole = "::" not in arguments[-1]
        assert result.returncode == whole, result.stdout
        assert ("test_of_a.ws1.comm: its test no longer exists" in result.stdout) == whole
        assert "there is no snapshot" not in result.stdout
    assert project.run("--snapshot-update", "-c", ini, str(outside / "tests")).returncode == 0
    files = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*.comm")}
    assert files == {("reviewed", "project", "tests")}
    assert len(list(tmp_path.rglob("*.comm"))) == 3
    outside.unlink()


# What others write while a session runs is theirs.

SLOW = """
import os, pathlib, time

def test_slow():
    if os.environ.get("SLOW"):
        pathlib.Path("began").touch()
        while not pathlib.Path("may-end").exists():
            time.sleep(0.02)
"""
PARAMETERS = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
def test_x(recorded, comm_snapshot, x):
    assert recorded == comm_snapshot
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "xdist"])
def test_an_update_keeps_what_another_session_recorded_meanwhile(tmp_path, arguments):
    project = Project(tmp_path)
    project.write("pytest.ini", "[pytest]\n")
    project.write("conftest.py", CONFTEST)
    module = SLOW + PARAMETERS
    project.write("test_p.py", module)
    project.write("test_gone.py", PARAMETERS)
    project.write("test_q.py", PARAMETERS)
    assert project.run("--snapshot-update").returncode == 0
    (tmp_path / "test_gone.py").unlink()
    module = module.replace("[1, 2]", "[2]")
    project.write("test_p.py", module)
    process = subprocess.Popen(
        [running.PYTHON, *PYTEST, "--snapshot-update", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SLOW": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    # As of another checkout: of test_p.py, the first session knows nothing any more.
    more = "    assert recorded == comm_snapshot(name='second')\n"
    project.write("test_p.py", module.replace("[2]", "[2, 3]") + more)
    result = project.run("--snapshot-update-new-only", "--snapshot-warn-unused")
    assert result.returncode == 0, result.stdout
    # What was not there when the session began, or is not what was there.
    kept = tmp_path / "snapshots/test_gone/test_x[1].ws1.comm"
    text = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(text)
    (tmp_path / "snapshots/test_q/test_x[1].ws1.second.comm").write_bytes(text)
    (tmp_path / "may-end").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert project.files() == {
        *(f"test_p/test_x[{x}].ws1{name}" for x in (2, 3) for name in ("", ".second")),
        "test_p/test_x[1].ws1",
        "test_gone/test_x[1].ws1",
        *(f"test_q/test_x[{name}.ws1" for name in ("1]", "2]")),
        "test_q/test_x[1].ws1.second",
    }
    assert "1 snapshot file deleted:" in output
    # As soon as nobody else writes, they go.
    assert project.run("--snapshot-update").returncode == 0
    assert "test_q/test_x[1].ws1.second" not in project.files()
    assert "test_p/test_x[1].ws1" not in project.files()
