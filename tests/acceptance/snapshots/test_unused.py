"""The files that a run lists as unused, suggests for a missing snapshot, or writes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass

import pytest
import running
from sessions import set_outermost

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

CONFTEST = """
import pytest
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.profile import CommProfile, Row

class Recorded:
    # Like comm_mode, but without ranks and torch: the list does not depend on them.
    def merged_profile(self, *, allow_divergence=False):
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


# Other installed plugins take longer to import than a case takes to run.
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
            # Looked up here, because a fixture replaces it.
            [running.PYTHON, *PYTEST, *arguments],
            cwd=self.path / cwd,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=extend_under_load(120),
        )

    def files(self):
        root = self.path / "snapshots"
        return {str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.comm")}


@pytest.fixture(scope="module", autouse=True)
def _outermost_module():
    """Keep sessions of module fixtures, too, from running as an xdist worker."""
    with pytest.MonkeyPatch.context() as patch:
        set_outermost(patch)
        yield


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
    unused: frozenset | set = frozenset()
    """The listed files."""
    exit: int | None = None
    """None for 1 if there are listed files, and 0 otherwise."""
    cwd: str = "."
    then: str = ""
    """Arguments of an earlier run that fills caches."""


TEST_A, SUB_A, SUB_B = "tests/test_a.py", "tests/sub/test_a.py", "tests/sub/test_b.py"
ONE_STARTS = "def test_one(recorded, comm_snapshot):"
SECOND = 'assert recorded == comm_snapshot(name="second")'


def first_line(text):
    """Becomes the first line of the first test of the second module."""
    return (SUB_A, ONE_STARTS, f"{ONE_STARTS}\n    {text}")


def before_second(text):
    """Runs between the two comparisons of a test."""
    return (TEST_A, SECOND, f"{text}\n    {SECOND}")


FAIL_A, FAIL_B = ((file, "    assert", "    assert False\n    assert") for file in (SUB_A, SUB_B))
NO_ONE = (TEST_A, "def test_one(", "def _one(")
NO_B_TWO = (SUB_B, "def test_two(", "def _two(")
UNNAMED = (TEST_A, f"    {SECOND}\n", "")
NO_TESTS = (SUB_B, "def test_", "def _")
SYNTAX_ERROR = (SUB_B, "def test_two(", "def test_two(]")
CLASS_ERROR = (
    TEST_A,
    "Llama:\n    def",
    "Llama:\n    @pytest.mark.parametrize('gone', [1])\n    def",
)
LAST_CLASS = (
    TEST_A,
    "def test_plain",
    "class TestLast:\n    def test_last(self): pass\n\ndef test_plain",
)
NO_LARGE = (TEST_A, ', "large"', "")
CRASH = first_line("import os; os._exit(1)")
ONE_UNUSED = {f"{A}/{name}" for name in ONE}
SECOND_UNUSED = {f"{A}/test_one.ws1.second"}
B = {"tests/sub/test_b/test_one.ws1", "tests/sub/test_b/test_two.ws1"}
B_TWO = {"tests/sub/test_b/test_two.ws1"}

CASES = {
    "all": Case(),
    # Deselected tests keep their files.
    "-k": Case(args="-k 'not plain'", edit=NO_ONE, unused=ONE_UNUSED),
    "-m": Case(args="-m 'not slow'", edit=NO_ONE, unused=ONE_UNUSED),
    "-m none": Case(args="-m slow"),
    "-k -n 2": Case(args="-n 2 -k 'not two'", edit=NO_ONE, unused=ONE_UNUSED),
    "--deselect": Case(args=f"--deselect {TEST_A}::test_plain", edit=NO_ONE, unused=ONE_UNUSED),
    # A run that collects only some tests lists nothing.
    "node id": Case(args=f"{TEST_A}::test_plain", edit=NO_ONE),
    "--lf after a failure": Case(then="tests", args="--lf", edit=(FAIL_B, NO_ONE), exit=1),
    "--sw after a failure": Case(then="tests --sw", args="--sw", edit=(FAIL_B, NO_ONE), exit=2),
    "ini value": Case(args="-o python_functions=test_plain", edit=NO_ONE),
    # So does a run without tests.
    "--collect-only": Case(args="--collect-only", edit=NO_ONE),
    "--setup-plan": Case(args="--setup-plan", edit=NO_ONE),
    # So does a run that ends early.
    "-x": Case(args="-x", edit=(first_line("assert False"), NO_ONE), exit=1),
    "--maxfail=1 -n 2": Case(
        args="--maxfail=1 -n 2", edit=(first_line("assert False"), NO_ONE), exit=2
    ),
    "pytest.exit": Case(edit=(first_line("import pytest; pytest.exit()"), NO_ONE), exit=2),
    "Ctrl-C": Case(edit=(first_line("raise KeyboardInterrupt"), NO_ONE), exit=2),
    "a worker crashes": Case(args="-n 2", edit=(CRASH, NO_ONE), exit=1),
    "syntax error": Case(edit=(SYNTAX_ERROR, NO_ONE), exit=2),
    # A test that did not pass keeps its files.
    "failure": Case(edit=before_second("assert False"), exit=1),
    "set-up error": Case(edit=(SUB_B, "def test_two(", "def test_two(missing, "), exit=1),
    "skip inside": Case(edit=before_second("pytest.skip()")),
    "module skipped": Case(edit=(TEST_A, "\n\ndef", "\npytest.skip(allow_module_level=True)\ndef")),
    "xfail inside": Case(edit=before_second("pytest.xfail()")),
    "no parameters": Case(edit=(TEST_A, '["small", "large"]', "[]")),
    "syntax error, going on": Case(
        args="--continue-on-collection-errors", edit=SYNTAX_ERROR, exit=1
    ),
    # Without TestLlama; a later class of the module is collected.
    "error in a class, going on": Case(
        args="--continue-on-collection-errors", edit=(CLASS_ERROR, LAST_CLASS), exit=1
    ),
    # Whole modules list what no test compared.
    "test gone": Case(edit=NO_ONE, unused=ONE_UNUSED),
    "test gone, another folder": Case(args="tests/sub", edit=NO_ONE),
    "test gone, another ignored": Case(
        args="--ignore tests/sub", edit=(NO_ONE, NO_B_TWO), unused=ONE_UNUSED
    ),
    "node id, -n 2": Case(args=f"-n 2 {TEST_A}::test_plain", edit=NO_ONE),
    "test gone, from a sub-folder": Case(cwd="tests/sub", edit=NO_B_TWO, unused=B_TWO),
    "test gone, -n 2": Case(args="-n 2", edit=NO_ONE, unused=ONE_UNUSED),
    "test gone, another fails": Case(edit=(NO_ONE, FAIL_B), exit=1, unused=ONE_UNUSED),
    "test gone, all others fail": Case(
        args="tests/sub", edit=(NO_B_TWO, FAIL_A, FAIL_B), exit=1, unused=B_TWO
    ),
    "class gone": Case(
        edit=(TEST_A, "class TestLlama", "class Llama"),
        unused={f"{A}/{name}" for name in CLASSES},
    ),
    "parameter gone": Case(edit=NO_LARGE, unused={f"{A}/test_sizes[large].ws1"}),
    "all tests of a module gone": Case(edit=NO_TESTS, unused=B),
    "comparison gone": Case(edit=UNNAMED, unused=SECOND_UNUSED),
    # syrupy's flags.
    "warn": Case(args="--snapshot-warn-unused", edit=NO_ONE, unused=ONE_UNUSED, exit=0),
    "disabled": Case(args="--snapshot-disable-unused", edit=NO_ONE),
    "update": Case(args="--snapshot-update", edit=(NO_ONE, UNNAMED), unused=ONE_UNUSED, exit=0),
    "new only": Case(args="--snapshot-update-new-only", edit=NO_ONE, unused=ONE_UNUSED),
}


def prepare(project, case):
    edits = case.edit if case.edit and isinstance(case.edit[0], tuple) else (case.edit,)
    for edit in filter(None, edits):
        project.edit(*edit)
    if case.then:
        project.run(*case.then.split())


def listed(result):
    """Return the listed files, without directory and suffix."""
    return set(re.findall(r"^  snapshots/(.*)\.comm$", result.stdout, re.MULTILINE))


# Each of these differs little from another one.
SIMILAR = {
    *("-m none", "-k -n 2", "--deselect", "ini value", "--setup-plan", "--maxfail=1 -n 2"),
    *("module skipped", "xfail inside", "no parameters", "syntax error, going on", "node id, -n 2"),
    *("test gone, another ignored", "test gone, another folder", "test gone, another fails"),
    *("warn", "disabled", "new only"),
}
assert {*CASES} > SIMILAR


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.release] * (name in SIMILAR))
        for name, case in CASES.items()
    ],
)
def test_unused_files_are_listed_and_never_deleted(project, case):
    prepare(project, case)
    result = project.run(*shlex.split(case.args), cwd=case.cwd)
    expected = bool(case.unused) if case.exit is None else case.exit
    assert result.returncode == expected, result.stdout + result.stderr
    assert listed(result) == case.unused, result.stdout
    assert "INTERNALERROR" not in result.stdout
    assert ("git " in result.stdout) == bool(case.unused)
    assert project.files() == ALL


def commit_all(project):
    author = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *arguments], cwd=project.path, check=True)  # noqa: S607  # users' git


PARAMETERS = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
def test_x(recorded, comm_snapshot, x):
    assert recorded == comm_snapshot

def test_x2(recorded, comm_snapshot):
    assert recorded == comm_snapshot
"""


@pytest.mark.parametrize("cwd", [".", "tests/sub"])
def test_unused_command_removes_what_is_listed(project, cwd):
    # git would read the brackets of parameters as a pattern, which the other test matches.
    project.write("tests/test_c.py", PARAMETERS)
    project.run("--snapshot-update")
    every = project.files()
    assert len(every) == len(ALL) + 3
    project.edit("tests/test_c.py", "[1, 2]", "[1]")
    commit_all(project)
    result = project.run("../" * cwd.count("/") + "../tests" if cwd != "." else "tests", cwd=cwd)
    command = re.search(r"^To remove them: (git .*)$", result.stdout, re.MULTILINE)
    assert command, result.stdout
    subprocess.run(command[1], shell=True, cwd=project.path / cwd, check=True)  # noqa: S602  # as pasted
    assert every - project.files() == {"tests/test_c/test_x[2].ws1"}


GONE = {
    "all": ("", ".", B),
    "a directory": ("tests", ".", B),
    "another module": (TEST_A, ".", set()),
    "a selection": ("-k 'not plain'", ".", B),
    "-x": ("-x --maxfail=1", ".", B),
}


@pytest.mark.parametrize(("args", "cwd", "unused"), GONE.values(), ids=list(GONE))
def test_unused_files_of_a_deleted_module_are_listed(project, args, cwd, unused):
    (project.path / SUB_B).unlink()
    result = project.run("--snapshot-update", *shlex.split(args), cwd=cwd)
    assert result.returncode == 0, result.stdout
    assert listed(result) == unused
    assert project.files() == ALL


def test_unused_ignores_modules_that_exist(project):
    project.write("tests/conftest.py", CONFTEST + "\ncollect_ignore = ['sub/test_b.py']\n")
    assert project.run().returncode == 0


@pytest.mark.parametrize("is_wrapper", [False, True])
def test_tests_that_a_plugin_removes_keep_their_files(project, is_wrapper):
    hook = "\ndef pytest_collection_modifyitems(items):\n    items[:] = [one for one in items if "
    hook = f"{hook}one.name != 'test_sizes[large]']\n"
    if is_wrapper:
        hook = f"\n@pytest.hookimpl(wrapper=True){hook}    return (yield)\n"
    project.write("tests/conftest.py", f"{CONFTEST}{hook}")
    assert listed(project.run()) == set()
    project.edit(*NO_ONE)
    project.edit(*NO_B_TWO)
    assert listed(project.run()) == ONE_UNUSED | B_TWO


def test_unused_ignores_other_world_sizes(tmp_path):
    project = Project(tmp_path)
    project.write("conftest.py", CONFTEST + TP_SIZES)
    project.write(
        "test_n.py",
        "import pytest\n@pytest.mark.distributed\n"
        "def test_t(tp, recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n",
    )
    for size in ("3", "2"):
        result = project.run("--snapshot-update", "--world-size", size)
        assert result.returncode == 0, result.stdout
    assert len(project.files()) == 3 + 2
    assert project.run("--world-size", "2").returncode == 0


TP_SIZES = """
def pytest_generate_tests(metafunc):
    if "tp" in metafunc.fixturenames:
        ranks = int(metafunc.config.getoption("--world-size"))
        metafunc.parametrize("tp", [size for size in (1, 2, 3) if size <= ranks])
"""


def test_unused_ignores_foreign_files(project):
    for name in ("README.txt", "notes.comm", "test_gone.comm", "todo.ws1.comm"):
        project.write(f"snapshots/tests/test_a/{name}", "mine")
    project.write("snapshots/notes/todo.ws1.comm", "mine")
    result = project.run("--snapshot-update")
    assert (result.returncode, listed(result)) == (0, set()), result.stdout
    assert len(project.files()) == len(ALL) + 4


@pytest.mark.parametrize("leave", ["pytest.skip('')", "pytest.xfail('')"])
def test_unused_ignores_an_unfinished_subtest(tmp_path, leave):
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
    project.write("test_s.py", source.replace("LEAVE", leave))
    assert project.run().returncode == 0


# Suggestions for a missing snapshot.


def missing(result):
    """Return the suggestions for missing snapshots, by name."""
    said = r"there is no snapshot snapshots/(\S+)\.comm yet\n(?:E +(?! *record)(.*)\n)?"
    return dict(re.findall(said, result.stdout))


RENAMED = {
    "selected test": (f"{A}/test_one", f"{A}/test_new"),
    "method": (f"{A}/TestLlama.test_step", f"{A}/TestLlama.test_new"),
    "parameter": (f"{A}/test_sizes[large]", f"{A}/test_sizes[big]"),
    "module": ("tests/sub/test_b/test_two", "tests/sub/test_c/test_two"),
}


@pytest.mark.parametrize("change", [pytest.param("", marks=pytest.mark.release), "regression"])
@pytest.mark.parametrize(("old", "new"), RENAMED.values(), ids=list(RENAMED))
def test_missing_snapshot_names_the_renamed_file(project, old, new, change):
    if change:
        project.edit("tests/conftest.py", "nbytes=4", "nbytes=8")
    arguments = ()
    if "test_b" in old:
        (project.path / SUB_B).rename(project.path / "tests/sub/test_c.py")
    elif "large" in old:
        project.edit(TEST_A, '"large"', '"big"')
    elif "test_one" in old:
        project.edit(TEST_A, "def test_one(", "def test_new(")
        arguments = (f"{TEST_A}::test_new",)
    else:
        project.edit(
            TEST_A, "class TestLlama:\n    def test_step", "class TestLlama:\n    def test_new"
        )
    result = project.run(*arguments)
    move = shlex.join(["mv", "-n", f"snapshots/{old}.ws1.comm", f"snapshots/{new}.ws1.comm"])
    if "test_c" in new:
        move = f"mkdir -p snapshots/tests/sub/test_c && {move}"
    lead = "was the test renamed?" if change else "the snapshot of a removed test is identical:"
    assert missing(result)[f"{new}.ws1"] == f"{lead} {move}"
    assert f"  snapshots/{old}.ws1.comm\n" not in result.stdout
    # Run the printed command.
    commit_all(project)
    subprocess.run(move, shell=True, cwd=project.path, check=True)  # noqa: S602  # as pasted
    assert f"{new}.ws1" not in missing(project.run(*arguments))


@pytest.mark.parametrize("args", ["", "-k sizes"])
def test_missing_snapshot_of_a_renamed_class_keeps_its_parameters(project, args):
    """All files of the class are equal, so only the names tell which belongs to which."""
    test = "\n    @pytest.mark.parametrize('size', ['small', 'large'])\n    def test_sizes("
    body = "self, recorded, comm_snapshot, size):\n        assert recorded == comm_snapshot\n"
    project.write("tests/test_c.py", f"import pytest\nclass TestOld:{test}{body}")
    assert project.run("--snapshot-update").returncode == 0
    project.edit("tests/test_c.py", "TestOld", "TestNew")
    result = project.run(*shlex.split(args))
    directory = "snapshots/tests/test_c"
    for size in ("small", "large"):
        end = f"test_sizes[{size}].ws1.comm"
        move = shlex.join(["mv", "-n", f"{directory}/TestOld.{end}", f"{directory}/TestNew.{end}"])
        said = missing(result)[f"tests/test_c/TestNew.test_sizes[{size}].ws1"]
        assert said == f"the snapshot of a removed test is identical: {move}"


def test_printed_commands_move_all_files_of_a_renamed_test(project):
    """Even if a failure is too long to show how to move all of its files."""
    several = {f"a_long_name_of_a_value_{number}": "recorded" for number in range(4)}
    values = ", ".join(f"'{name}': {value}" for name, value in several.items())
    for name in ("test_of_several", "test_renamed"):
        source = f"def {name}(recorded, comm_snapshot):\n    assert {{{values}}} == comm_snapshot\n"
        project.write("tests/test_c.py", source)
        result = project.run(*["--snapshot-update"] * (name == "test_of_several"))
    assert "git rm" not in result.stdout
    assert "To remove them" not in result.stdout
    _, _, below = result.stdout.partition("To move them:\n")
    commands = [line.strip() for line in below.splitlines() if line.startswith("  mv -n ")]
    assert len(commands) == len(several)
    for command in commands:
        subprocess.run(command, shell=True, cwd=project.path, check=True)  # noqa: S602  # as pasted
    result = project.run()
    assert result.returncode == 0
    assert "To move them" not in result.stdout


def test_missing_snapshot_without_a_renamed_one(project):
    project.edit(TEST_A, "def test_plain():", ONE_STARTS.replace("one", "new") + "\n    " + SECOND)
    assert missing(project.run()) == {f"{A}/test_new.ws1.second": ""}


@pytest.mark.parametrize("args", ["", "-k two", f"{SUB_A}::test_two"])
def test_missing_snapshot_is_not_that_of_another_test(project, args):
    (project.path / f"snapshots/{SUB}/test_two.ws1.comm").unlink()
    assert missing(project.run(*shlex.split(args))) == {f"{SUB}/test_two.ws1": ""}


def test_missing_snapshot_names_other_world_sizes(tmp_path):
    project = Project(tmp_path)
    project.write("conftest.py", CONFTEST)
    source = "import pytest\n@pytest.mark.distributed(world_size=2)\n"
    source += "def test_t(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
    project.write("test_n.py", source)
    assert project.run("--snapshot-update").returncode == 0
    project.write("test_n.py", source.replace("=2", "=3"))
    hint = "there is a snapshot for 2 ranks: snapshots/test_n/test_t.ws2.comm"
    assert missing(project.run()) == {"test_n/test_t.ws3": hint}


def test_missing_snapshot_is_found_in_a_nested_project(tmp_path):
    """A monorepo: above a package with settings of its own, pytest has another root."""
    project = Project(tmp_path)
    source = "def test_t(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
    for package in ("one", "two"):
        project.write(f"services/{package}/pytest.ini", "[pytest]\n")
        project.write(f"services/{package}/tests/conftest.py", CONFTEST)
        project.write(f"services/{package}/tests/test_{package}.py", source)
    assert project.run("--snapshot-update", cwd="services/one").returncode == 0
    file = "services/one/snapshots/tests/test_one/test_t.ws1.comm"
    result = project.run("services")
    assert missing(result) == {
        "services/one/tests/test_one/test_t.ws1": f"{file} exists: start pytest in services/one",
        "services/two/tests/test_two/test_t.ws1": "",
    }
    assert project.run(cwd="services/one").returncode == 0


# Updates.

RANKS = "@pytest.mark.distributed(world_size=2)\n"
LEAVES = {
    "fails": "    assert False\n",
    "skips": "    import pytest; pytest.skip()\n",
    "xfails": "    import pytest; pytest.xfail()\n",
    "loses a rank": "    import os; os.environ.get('RANK') == '1' and os._exit(1)\n",
    "fails on a rank": "    import os; assert os.environ.get('RANK') != '1'\n",
    "passes": "",
}


ENDINGS = {
    f"{name}-{kind}": (marker, leave)
    for name, leave in LEAVES.items()
    for kind, marker in (("one", ""), ("ranks", RANKS))
    if marker or "RANK" not in leave
}


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """Update a changed project, with a module for each ending; return both runs' files, too."""
    project = Project(tmp_path_factory.mktemp("updated"))
    project.write("conftest.py", CONFTEST)
    modules = {
        f"test_{number}.py": (
            f"import pytest\n{marker}def test_t(recorded, comm_snapshot):\n"
            "    assert recorded == comm_snapshot\n",
            leave,
        )
        for number, (marker, leave) in enumerate(ENDINGS.values())
    }
    for name, (source, _) in modules.items():
        project.write(name, source)
    result = project.run("--snapshot-update")
    assert result.returncode == 0, result.stdout
    before = snapshot_texts(project)
    project.edit("conftest.py", "nbytes=4", "nbytes=8")
    for name, (source, leave) in modules.items():
        project.write(name, f"{source}    assert recorded == comm_snapshot(name='new')\n{leave}")
    result = project.run("--snapshot-update")
    return result, before, snapshot_texts(project)


def snapshot_texts(project):
    """Return the snapshots by module and name."""
    files = project.path.glob("snapshots/*/*")
    return {(file.parent.name, file.name): file.read_text() for file in files}


@pytest.mark.parametrize("ending", ENDINGS)
def test_update_writes_only_for_tests_that_passed(updated, ending):
    result, *texts = updated
    module = f"test_{[*ENDINGS].index(ending)}"
    before, after = (
        {name: text for (folder, name), text in both.items() if folder == module} for both in texts
    )
    (recorded,) = before
    is_written = ending.startswith("passes")
    assert (after[recorded] != before[recorded]) == is_written, result.stdout
    assert (len(after) == 2) == is_written


def test_update_counts_only_tests_that_passed(updated):
    result, *_ = updated
    assert "2 snapshots updated" in result.stdout
    assert "2 snapshots generated" in result.stdout


def test_update_of_failed_ranks_writes_no_plain_file(tmp_path):
    project = Project(tmp_path)
    source = f"import pytest\n{RANKS}def test_t(snapshot, comm_mode):\n    assert 1 == snapshot\n"
    project.write("test_n.py", source)
    assert project.run("--snapshot-update").returncode == 0
    (file,) = (tmp_path / "__snapshots__").iterdir()
    before = file.read_text()
    project.write("test_n.py", source.replace("1 ==", "2 ==") + "    assert False\n")
    assert project.run("--snapshot-update").returncode == 1
    assert file.read_text() == before


@pytest.mark.parametrize("ranks", ["", RANKS], ids=["one", "ranks"])
def test_update_writes_after_a_rerun(tmp_path, ranks):
    project = Project(tmp_path)
    project.write("conftest.py", CONFTEST)
    source = f"import pathlib, pytest\n{ranks}def test_t(recorded, comm_snapshot, request):\n"
    source += (
        "    assert recorded == comm_snapshot\n    first = request.config.rootpath / 'first'\n"
    )
    source += "    if not first.exists():\n        first.touch(); assert False\n"
    project.write("test_n.py", source)
    result = project.run("--snapshot-update", "-prerunfailures", "--reruns=2")
    assert result.returncode == 0, result.stdout
    assert len(project.files()) == 1


def test_update_does_not_write_if_the_teardown_fails(tmp_path):
    project = Project(tmp_path)
    fixture = "\n@pytest.fixture\ndef failing():\n    yield\n    assert False\n"
    project.write("conftest.py", CONFTEST + fixture)
    source = "def test_t(failing, recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
    project.write("test_n.py", source)
    assert project.run("--snapshot-update").returncode == 1
    assert project.files() == set()


# Where files are.


def test_project_behind_a_link_has_the_same_files(project, tmp_path):
    link, ini = tmp_path / "link", str(project.path / "pytest.ini")
    link.symlink_to(project.path)
    project.edit(*NO_ONE)
    for arguments in ((str(link),), (f"--rootdir={link}",), ("-n2", "-c", ini, f"{link}/tests")):
        cwd = ".." if arguments[0] == str(link) else "."
        result = project.run(*arguments, cwd=cwd)
        assert result.returncode == 1, result.stdout
        names = set(re.findall(r"^  \S*snapshots/(\S+)\.comm$", result.stdout, re.MULTILINE))
        assert names == ONE_UNUSED
        assert "there is no snapshot" not in result.stdout
    assert project.files() == ALL


def test_syrupy_s_own_directory_is_refused(project):
    project.write("pytest.ini", "[pytest]\nfsdp_comm_snapshot_dir = tests/__snapshots__\n")
    result = project.run("--snapshot-update")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "ini fsdp_comm_snapshot_dir: syrupy stores plain `snapshot` assertions in '__snapshots__' "
        "and deletes other files there; choose a different directory, e.g. 'snapshots'"
        in result.stderr
    )


@pytest.mark.parametrize("leave", ["os.kill(os.getpid(), 2)", "pytest.exit('enough')", "wait()"])
def test_interrupted_update_counts_written_files(tmp_path, leave):
    """The second test is left after its comparison, so only the first test's file is written."""
    project = Project(tmp_path)
    project.write("conftest.py", CONFTEST)
    project.write(
        "test_it.py",
        "import os, pathlib, pytest, time\n\n"
        "def wait():\n    pathlib.Path('waiting').touch()\n    time.sleep(1000)\n\n"
        "def test_a(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n\n"
        "def test_b(recorded, comm_snapshot):\n    assert recorded == comm_snapshot\n"
        f"    {leave}\n",
    )
    session = running.start(tmp_path, "--snapshot-update")
    if leave == "wait()":
        running.wait_for((tmp_path / "waiting").exists)
        session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=extend_under_load(60))
    assert session.returncode == pytest.ExitCode.INTERRUPTED, output
    assert [file.name for file in tmp_path.rglob("*.comm")] == ["test_a.ws1.comm"]
    assert re.search(r"^1 snapshot generated\.$", output, re.MULTILINE), output
