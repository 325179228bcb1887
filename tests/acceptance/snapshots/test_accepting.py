"""Run the commands that failed comparisons print, in projects like those of users."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
import running

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

TRAINING = """
KEPT = False

def make(mesh):
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not KEPT)
    return fully_shard(model, mesh=mesh)

def step(model):
    import torch
    model(torch.randn(2, 8)).sum().backward()
"""
CONFTEST = """
import pytest
import training
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.profile import CommProfile, Row

class Recorded:
    # Like comm_mode, but without torch: commands do not depend on model and ranks.
    def merged_profile(self, *, allow_divergence=False):
        row = Row(
            phase=Phase.FORWARD, owner="a", what="all_gather", axis="dp",
            calls=(Calls(count=1, nbytes=8 if training.KEPT else 4),),
        )
        axis = MeshAxis(name="dp", size=2, dims=((2, 1),))
        return CommProfile(world_size=2, mesh_axes=(axis,), rows=(row,), backend="gloo")

@pytest.fixture
def both():
    return {"comm": Recorded(), "tree": Recorded()}
"""
MODULE = """
import pytest

def test_step(both, comm_snapshot):
    assert both == comm_snapshot

@pytest.mark.parametrize("name", ["tied", "un tied", "a::b", "it's", '"$HOME`!', "[x]"])
def test_names(both, comm_snapshot, name):
    assert both == comm_snapshot

class TestLlama:
    @pytest.mark.distributed(world_size=[2, 3])
    def test_step(self, both, comm_snapshot):
        assert both == comm_snapshot(name="step")
"""
OTHER = """
import pytest
import training

@pytest.mark.distributed(world_size=2)
def test_step(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = training.make(device_mesh())
    with comm_mode(model):
        training.step(model)
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot
"""


class Project:
    def __init__(self, path):
        self.path = path

    def run(self, *arguments, cwd="."):
        return subprocess.run(
            [running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=self.path / cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=extend_under_load(300),
        )

    def shell(self, command, cwd="."):
        return subprocess.run(  # noqa: S602  # as the user would paste it
            command.replace("pytest ", f"{running.PYTHON} -m pytest -p no:cacheprovider ", 1),
            shell=True,
            cwd=self.path / cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=extend_under_load(300),
        )

    def files(self):
        root = self.path / "snapshots"
        return {
            str(file.relative_to(root)): file.read_text()
            for file in root.rglob("*")
            if file.is_file()
        }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded")
    (path / "tests/sub").mkdir(parents=True)
    (path / "pytest.ini").write_text("[pytest]\npythonpath = .\ntestpaths = tests\n")
    (path / "training.py").write_text(TRAINING)
    (path / "tests/sub/conftest.py").write_text(CONFTEST)
    (path / "tests/sub/test_step.py").write_text(MODULE)
    (path / "tests/test_other.py").write_text(OTHER)
    project = Project(path)
    result = project.run("--snapshot-update", "--world-size", "2")
    assert result.returncode == 0, result.stdout
    assert len(project.files()) == 2 * (1 + 6 + 2 + 1)
    return project


@pytest.fixture
def changed(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "project")
    source = TRAINING.replace("KEPT = False", "KEPT = True")
    (tmp_path / "project/training.py").write_text(source)
    return Project(tmp_path / "project")


def changed_files(project, before):
    after = project.files()
    assert after.keys() == before.keys()
    return {name for name, text in after.items() if text != before[name]}


def accept_commands(result):
    found = re.findall(r"^E\s+accept: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout
    return list(dict.fromkeys(found))


STEP = "tests/sub/test_step.py"
CASES = {
    "function": (f"{STEP}::test_step", ".", "test_step"),
    "function, from its folder": ("test_step.py::test_step", "tests/sub", "test_step"),
    "class and world size": (
        f"{STEP}::TestLlama::test_step[ws3]", ".", "TestLlama.test_step.ws3"
    ),
    "parameters": (f"{STEP}::test_names", ".", "test_names"),
    "with a world size of the command line": (
        f"--world-size 3 '{STEP}::test_names[un tied]'",
        ".",
        "test_names[un tied]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "cwd", "name"), CASES.values(), ids=list(CASES))
def test_accept_command_changes_only_files_of_test(changed, args, cwd, name):
    before = changed.files()
    # Whole lines, as in CI.
    result = changed.run(*shlex.split(args), "-vv", cwd=cwd)
    assert result.returncode == 1, result.stdout
    assert changed.files() == before
    for command in accept_commands(result):
        accepted = changed.shell(command, cwd=cwd)
        assert accepted.returncode == 0, command + accepted.stdout + accepted.stderr
        assert "deleted" not in accepted.stdout
    place = f"tests/sub/test_step/{name}"
    expected = {file for file in before if file.startswith(place)}
    assert changed_files(changed, before) == expected
    assert len(expected) in {2, 12}
    assert changed.run(*shlex.split(args), cwd=cwd).returncode == 0


def test_broken_file_among_several_has_no_accept(changed):
    place = changed.path / "snapshots/tests/test_other"
    (place / "test_step.ws2.comm").write_text("garbage\n")
    result = changed.run("tests/test_other.py", "--comm-artifacts", "kept")
    assert result.returncode == 1
    assert "comm: snapshots/tests/test_other/test_step.ws2.comm, line 1: " in result.stdout
    assert "tree: fsdp_tree differs from" in result.stdout
    assert "accept:" not in result.stdout
    # The artifacts of a comparison that passed in a later run are removed.
    assert (changed.path / "kept/received/tests/test_other/test_step.ws2.tree.comm").is_file()
    (changed.path / "training.py").write_text(TRAINING)
    changed.run("tests/test_other.py", "--comm-artifacts", "kept")
    assert not list((changed.path / "kept").rglob("*.comm"))


def test_assertion_of_dict_reports_all_comparisons(changed):
    before = changed.files()
    result = changed.run("tests/test_other.py", "--comm-artifacts", "kept")
    assert result.returncode == 1
    place = "snapshots/tests/test_other/test_step.ws2"
    lines = result.stdout.splitlines()
    shown = [line.removeprefix("E").strip() for line in lines if line.startswith("E")]
    assert shown[0].removeprefix("AssertionError: ") == (
        f"assert comm_mode and fsdp_tree differ from {place} (2 files)"
    )
    assert any(line.startswith("modules {0..1} no longer resharded") for line in shown)
    assert "tree: {0..1}: reshard_after_forward True -> False" in shown
    assert "not compared:" not in result.stdout
    assert 'accept: pytest --snapshot-update "tests/test_other.py::test_step"' in shown
    # After `fsdp-comm accept` with the artifacts on another machine, the next run passes.
    assert changed.files() == before
    kept = {
        str(path.relative_to(changed.path / "kept"))
        for path in (changed.path / "kept").rglob("*")
        if path.is_file()
    }
    assert kept == {
        f"{folder}/tests/test_other/test_step.ws2{name}.comm"
        for folder in ("received", "expected")
        for name in ("", ".tree")
    }
    accepted = subprocess.run(
        [sys.executable, "-m", "pytest_fsdp_comm", "accept", "kept"],
        cwd=changed.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert accepted.returncode == 0, accepted.stderr
    assert f"{place}.comm:\n" in accepted.stdout
    assert changed_files(changed, before) == {
        "tests/test_other/test_step.ws2.comm",
        "tests/test_other/test_step.ws2.tree.comm",
    }
    assert changed.run("tests/test_other.py").returncode == 0


NOT_COMPARABLE = {
    "{}": "got an empty dict",
    "{1: comm_mode}": "got a dict with the keys [1]",
    "{'': comm_mode}": "got a dict with the keys ['']",
    "{'comm': {'x': comm_mode}}": "got a dict with the keys ['x']",
    "[comm_mode]": "got list",
}


def test_a_dict_that_compares_nothing_fails(pytester):
    pytester.makepyfile(
        "\n".join(
            f"def test_{n}(comm_mode, comm_snapshot):\n    assert {other} == comm_snapshot"
            for n, other in enumerate(NOT_COMPARABLE)
        )
    )
    for arguments in ((), ("--snapshot-update",)):
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        result.assert_outcomes(failed=len(NOT_COMPARABLE))
        for got in NOT_COMPARABLE.values():
            assert (
                "comm_snapshot compares comm_mode, fsdp_tree(model), or a dict of these by name "
                f'such as {{"comm": comm_mode, "tree": fsdp_tree(model)}}, {got}; for other values '
                "use syrupy's plain `snapshot` fixture" in result.stdout.str()
            )
    assert not (pytester.path / "snapshots").exists()
