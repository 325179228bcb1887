"""What docs/ci.md and the files in .github give to copy runs as GitHub and GitLab would run it.

As far as a shell can: each step of a job in its directory, with its environment and its values of
the matrix. pip is replaced by a program that checks what it is asked for.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import running
import yaml

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/communication-gate/action.yml"
GATE = "pytest-fsdp-comm/pytest-fsdp-comm/.github/actions/communication-gate"
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/communication-gate.yml").read_text())
ON_PAGE = [
    yaml.safe_load(block)
    for block in re.findall(r"(?ms)^```yaml\n(.*?)^```$", (ROOT / "docs/ci.md").read_text())
]
GITHUB = [page["jobs"]["communication"] for page in ON_PAGE if "jobs" in page]
(GITLAB,) = (page["communication"] for page in ON_PAGE if "communication" in page)

PYPROJECT = """
[project]
name = "training"
version = "1"
dependencies = ["torch>=2.7"]
optional-dependencies.test = ["pytest>=8.4"]

[tool.pytest.ini_options]
pythonpath = ["src"]
addopts = "--strict-markers -p no:cacheprovider"
"""
TRAINING = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def step(mesh, comm_mode):
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        for part in torch.randn(4, 8).chunk(PARTS):
            model(part).sum().backward()
"""
TEST = """
import pytest

@pytest.mark.distributed
def test_step(step, device_mesh, comm_mode, comm_snapshot):
    step(device_mesh(), comm_mode)
    assert comm_mode == comm_snapshot

def test_plain():
    raise AssertionError("is not of -m distributed")
"""
CONFTEST = """
import pytest
import training

@pytest.fixture
def step():
    return training.step
"""
PIP = """
import os, re, sys, tomllib
from importlib import metadata
from pathlib import Path
from packaging.requirements import Requirement

command, *arguments = sys.argv[1:]
assert command == "install", command
assert os.environ["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"
for argument in arguments:
    if argument == "-e":
        continue
    wanted = [argument]
    if argument.startswith("."):
        path, extra = re.fullmatch(r"([./\\w]+)\\[(\\w+)\\]", argument).groups()
        project = tomllib.loads(Path(path, "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    for requirement in map(Requirement, wanted):
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)
with open(os.environ["INSTALLED"], "a") as log:
    log.write(" ".join(arguments) + "\\n")
"""
OFF = [f"-pno:{name}" for name in ("asyncio", "hypothesispytest", "rerunfailures", "timeout")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A project with the snapshots of two world sizes, and the programs that jobs call."""
    top = tmp_path_factory.mktemp("recorded")
    project, programs = top / "project", top / "bin"
    for folder in (programs, project / "tests", project / "src"):
        folder.mkdir(parents=True)
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "conftest.py").write_text(CONFTEST)
    (project / "tests/test_step.py").write_text(TEST)
    (project / "src/training.py").write_text(f"PARTS = 1\n{TRAINING}")
    (programs / "pip.py").write_text(PIP)
    python, pip = shlex.quote(sys.executable), shlex.quote(str(programs / "pip.py"))
    for name, lines in {
        "pip": [f'exec {python} {pip} "$@"'],
        "pytest": [f'exec {running.PYTHON} -m pytest {" ".join(OFF)} -pno:randomly "$@"'],
        "python": [
            f'if [ "$1 $2" = "-m pip" ]; then shift 2; exec {python} {pip} "$@"; fi',
            f'if [ "$1 $2" = "-m pytest" ]; then shift 2; exec {programs}/pytest "$@"; fi',
            f'exec {python} "$@"',
        ],
    }.items():
        (programs / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (programs / name).chmod(0o700)
    for world_size in ("2", "4"):
        arguments = ("-mdistributed", "--snapshot-update", f"--world-size={world_size}")
        command = [programs / "pytest", *arguments]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(project.glob("snapshots/tests/test_step/*.comm"))) == 2
    return SimpleNamespace(project=project, programs=programs)


@pytest.fixture
def runner(recorded, tmp_path):
    """A machine with the project in a sub-folder of its checkout, or at the top."""

    def make(folder, temp="_temp", *, is_changed=False):
        workspace = tmp_path / "work/repository"
        project = workspace / folder
        shutil.copytree(recorded.project, project)
        if project != workspace:
            # Where nothing can be installed, and pytest would find other settings.
            (workspace / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-x'\n")
        if is_changed:
            training = project / "src/training.py"
            training.write_text(training.read_text().replace("PARTS = 1", "PARTS = 2"))
        (tmp_path / temp).mkdir(exist_ok=True)
        return Runner(workspace, tmp_path / temp, recorded.programs)

    return make


class Runner:
    """Runs one job."""

    def __init__(self, workspace, temp, programs):
        self.workspace, self.temp = workspace, temp
        self.output, self.status, self.uploads = "", 0, {}
        self.installed, self.summary = temp / "installed.txt", temp / "summary.md"
        self._written = temp / "output.txt"
        self.values = {"runner.temp": str(temp)}
        ours = ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ours},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "CI": "true",
            "INSTALLED": str(self.installed),
        }

    def github(self, job, matrix=None):
        """Runs the steps of a job of GitHub."""
        assert job.keys() <= {
            *("runs-on", "permissions", "timeout-minutes", "env", "steps", "strategy")
        }
        self.values |= {f"matrix.{name}": str(value) for name, value in (matrix or {}).items()}
        self.environment |= {
            **{name: self._expand(value) for name, value in job.get("env", {}).items()},
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self._written),
            "RUNNER_TEMP": str(self.temp),
        }
        for step in job["steps"]:
            self._step(step)
        return self

    def gitlab(self, job, matrix):
        """Runs the script of a job of GitLab."""
        assert job.keys() == {"image", "parallel", "variables", "script", "artifacts"}
        self.environment |= job["variables"] | matrix
        for line in job["script"]:
            if not self.status:
                self._shell(["bash", "-eo", "pipefail", "-c", line], ".", {})
        return self

    def _step(self, step):
        failed_only = "failure()" in step.get("if", "")
        if failed_only != bool(self.status):
            return
        given = {name: self._expand(value) for name, value in step.get("with", {}).items()}
        name = step.get("uses", "").partition("@")[0]
        if "run" in step:
            # As GitHub runs steps with `shell: bash`, and without `shell`.
            strict = ["--noprofile", "--norc", "-eo", "pipefail"]
            shell = ["bash", *(strict if step.get("shell") == "bash" else ["-e"])]
            folder = self._expand(step.get("working-directory", "."))
            environment = {name: self._expand(value) for name, value in step.get("env", {}).items()}
            self._shell([*shell, "-c", self._expand(step["run"])], folder, environment)
            written = self._written.read_text() if self._written.exists() else ""
            for line in written.splitlines():
                output, _, value = line.partition("=")
                self.values[f"steps.{step['id']}.outputs.{output}"] = value
        elif name == GATE:
            action = yaml.safe_load(ACTION.read_text())
            assert given.keys() <= action["inputs"].keys()
            inputs = {name: one["default"] for name, one in action["inputs"].items()} | given
            self.values |= {f"inputs.{name}": value for name, value in inputs.items()}
            for inner in action["runs"]["steps"]:
                self._step(inner)
        elif name == "actions/upload-artifact":
            assert given["name"] not in self.uploads
            self.uploads[given["name"]] = Path(given["path"])
        else:
            assert name in {"actions/checkout", "actions/setup-python"}

    def _expand(self, value):
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: self.values[found[1]], str(value))

    def _shell(self, command, folder, environment):
        done = subprocess.run(
            command,
            cwd=self.workspace / folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=extend_under_load(300),
        )
        self.output += done.stdout
        self.status = self.status or done.returncode


def check_green(runner):
    assert runner.status == 0, runner.output
    assert runner.uploads == {}
    assert "1 passed" in runner.output


def check_red(runner, directory, world_size):
    """The project's own snapshot was read, and what is different can be downloaded."""
    assert runner.status == 1, runner.output
    assert "1 failed" in runner.output
    assert "all calls: twice as many" in runner.output
    received = directory / f"received/tests/test_step/test_step.ws{world_size}.comm"
    assert [path for path in directory.rglob("*.comm") if "expected" not in path.parts] == [
        received
    ]


@pytest.mark.parametrize(
    ("is_changed", "world_size", "temp"),
    [
        pytest.param(
            *(is_changed, world_size, temp),
            id=f"{'changed' if is_changed else 'equal'}-{world_size}-{place}",
            # Each pair of values is in one of the other combinations.
            marks=[pytest.mark.release] * (is_changed ^ (world_size == 2) ^ (place == "beside")),
        )
        for is_changed in (False, True)
        for world_size in (2, 4)
        for temp, place in (("work/_temp", "beside"), (".", "above"))
    ],
)
def test_the_action_gates_a_project_in_a_sub_folder(runner, temp, world_size, is_changed):
    """With its default arguments, which run two ranks; and those with another world size."""
    given = {"working-directory": "packages/training", "artifact": "differences-${{ matrix.size }}"}
    given |= {"arguments": "-m distributed --world-size 4"} if world_size == 4 else {}
    job = {"steps": [{"uses": f"{GATE}@main", "with": given}]}
    runner = runner("packages/training", temp, is_changed=is_changed)
    runner.github(job, {"size": world_size})
    if is_changed:
        (directory,) = runner.uploads.values()
        assert runner.uploads.keys() == {f"differences-{world_size}"}
        assert directory.is_relative_to(runner.temp)
        check_red(runner, directory, world_size)
        assert "all calls: twice as many" in runner.summary.read_text()
    else:
        check_green(runner)


def matrix_of(job):
    """The values of each job of a matrix."""
    matrix = job["strategy"]["matrix"] if "strategy" in job else {}
    combined = itertools.product(*matrix.values())
    return [dict(zip(matrix, values, strict=True)) for values in combined]


@pytest.mark.parametrize(
    ("job", "folder", "values", "is_changed"),
    [
        (job, folder, values, is_changed)
        for job, folder in zip(GITHUB, (".", "packages/training"), strict=True)
        for values, is_changed in zip(
            matrix_of(job) * (1 if len(matrix_of(job)) == 2 else 2), (False, True), strict=True
        )
    ],
)
def test_the_workflows_on_the_page_gate_a_project(runner, job, folder, values, is_changed):
    runner = runner(folder, is_changed=is_changed).github(job, values)
    assert runner.installed.read_text().startswith("-e .[test] pytest-fsdp-comm"), runner.output
    if is_changed:
        ((name, directory),) = runner.uploads.items()
        size = values.get("world-size", 2)
        assert name == "communication-differences" + (f"-{size}" if values else "")
        check_red(runner, directory, size)
    else:
        check_green(runner)


@pytest.mark.parametrize("is_changed", [False, True], ids=["equal", "changed"])
def test_the_workflow_to_copy_gates_a_project(runner, is_changed):
    runner = runner(".", is_changed=is_changed).github(WORKFLOW["jobs"]["communication"])
    assert "-e .[test]" in runner.installed.read_text()
    if is_changed:
        check_red(runner, runner.uploads["communication-differences"], 4)
    else:
        check_green(runner)


@pytest.mark.parametrize(("index", "is_changed"), [(0, False), (1, True)])
def test_the_gitlab_job_gates_a_project(runner, index, is_changed):
    ((name, values),) = GITLAB["parallel"]["matrix"][0].items()
    runner = runner(".", is_changed=is_changed).gitlab(GITLAB, {name: values[index]})
    assert "-e .[test]" in runner.installed.read_text()
    (kept,) = GITLAB["artifacts"]["paths"]
    directory = runner.workspace / kept
    assert (runner.workspace / GITLAB["artifacts"]["reports"]["junit"]).exists()
    assert GITLAB["artifacts"]["when"] == "always"
    assert "ommunication" in (directory / "summary.md").read_text()
    if is_changed:
        check_red(runner, directory, int(values[index]))
    else:
        check_green(runner)


def test_nothing_can_be_installed_outside_a_project(runner):
    """What stands in for pip refuses what pip would refuse."""
    _, in_sub_folder = GITHUB
    job = {**in_sub_folder, "steps": [dict(step) for step in in_sub_folder["steps"]]}
    del job["steps"][2]["working-directory"]
    runner = runner("packages/training").github(job, {"world-size": 2})
    assert runner.status != 0
    assert "KeyError: 'project'" in runner.output
