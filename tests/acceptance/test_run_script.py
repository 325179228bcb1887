"""run.py on a fresh machine: the environment, commands and output. Nothing is downloaded."""

import ast
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
BASE_PYTHON = sys._base_executable
PIP = """
import json, os, pathlib, signal, sys

env = pathlib.Path(sys.prefix)
with (env / "pip.log").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
how = env / "how"
if how.exists():
    os.kill(os.getppid(), signal.SIGKILL) if how.read_text() == "killed" else sys.exit(1)
pytest = env / "bin" / "pytest"
pytest.write_text(
    f"#!{sys.executable}\\n"
    "import json, os, shutil, sys\\n"
    "found = shutil.which('pytest')\\n"
    "print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['VIRTUAL_ENV'], found]))\\n"
    "sys.exit(3)\\n"
)
pytest.chmod(0o755)
"""
# Creates environments without pip, because installing pip takes ten times as long.
WITHOUT_PIP = """
import venv
venv.EnvBuilder._setup_pip = lambda self, context: None
"""
INSTALLS = [
    *("install", "--disable-pip-version-check", "--quiet"),
    *("-c", "constraints.txt", "-e", ".[test]"),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A clone, and a shell without an active environment."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("run.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    for name in [name for name in os.environ if name.startswith(("PIP_", "VIRTUAL_ENV", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)  # not the clone

    def run(*arguments, python=BASE_PYTHON, **variables):
        return subprocess.run(
            [python, str(clone / "run.py"), *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return SimpleNamespace(path=clone, run=run)


def fake_pip(environment):
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "pip").mkdir(exist_ok=True)
    (packages / "pip" / "__init__.py").write_text("")
    (packages / "pip" / "__main__.py").write_text(PIP)


@pytest.fixture
def environment(tmp_path):
    """An environment whose pip installs a pytest that tells how it was called."""
    made = tmp_path / "env"
    venv.EnvBuilder(symlinks=True).create(made)
    fake_pip(made)
    return made


def installations(environment):
    log = environment / "pip.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.release
def test_failed_installation_is_reported(project):
    """With real venv and pip, without an index."""
    result = project.run("demo", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    made = project.path / ".venv"
    assert result.returncode == 2
    assert f"run.py: creating the virtual environment {made}" in result.stderr
    assert (
        f"-c constraints.txt -e .[test]` failed in {project.path}, see above. Is the network up, "
        "or PIP_INDEX_URL set to a mirror? Nothing was run; fix the problem and run this again"
    ) in result.stderr
    assert "Traceback" not in result.stderr
    fake_pip(made)
    assert project.run("demo").returncode == 3


def test_missing_environment_is_created_once(project, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PIP)
    (tmp_path / "ensurepip.py").write_text("raise SystemExit(1)")
    made = project.path / ".venv"
    result = project.run("demo", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert f"run.py: creating the virtual environment {made}" in result.stderr
    assert f"`{made}/bin/python -m ensurepip` failed, see above" in result.stderr
    fake_pip(made)
    (made / "how").write_text("fails")
    result = project.run("demo")
    assert result.returncode == 2
    assert f"failed in {project.path}, see above. Is the network up, or" in result.stderr
    (made / "how").unlink()
    (made / "pip.log").unlink()
    result = project.run("demo", "-x")
    assert result.returncode == 3
    assert "creating" not in result.stderr
    assert installations(made) == [INSTALLS]
    assert json.loads(result.stdout) == [
        ["--world-size", "4", "examples", "-x"],
        *map(str, (project.path, made, made / "bin" / "pytest")),
    ]
    again = project.run("test", "tests/unit", "--help")
    assert json.loads(again.stdout)[0] == ["-n", "4", "--dist", "loadfile", "tests/unit", "--help"]
    assert (again.returncode, again.stderr) == (3, "")
    assert installations(made) == [INSTALLS]


def test_outdated_installation_is_reinstalled(project, environment):
    def runs(**changed):
        before = len(installations(environment))
        result = project.run("test", VIRTUAL_ENV=str(environment), **changed)
        return result.returncode, len(installations(environment)) - before

    constraints = project.path / "constraints.txt"
    pins = constraints.read_text()
    assert [runs(), runs()] == [(3, 1), (3, 0)]
    constraints.write_text(pins + "# another pin\n")
    (environment / "how").write_text("fails")
    assert [runs(), runs()] == [(2, 1), (2, 1)]
    (environment / "how").unlink()
    assert [runs(), runs()] == [(3, 1), (3, 0)]
    # Ended while pip ran: what is there is of neither version, also when the file is as it was.
    (environment / "how").write_text("killed")
    constraints.write_text(pins)
    assert runs() == (-9, 1)
    (environment / "how").unlink()
    constraints.write_text(pins + "# another pin\n")
    assert [runs(), runs()] == [(3, 1), (3, 0)]
    assert not (project.path / ".venv").exists()


def test_other_clone_has_separate_installation(project, environment):
    assert project.run("test", python=str(environment / "bin" / "python")).returncode == 3
    other = project.path.with_name("other")
    project.path.rename(other)
    command = [str(environment / "bin" / "python"), str(other / "run.py"), "test"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3
    assert len(installations(environment)) == 2


PYTHONS = {
    "old": "echo '[[3, 10, 13], true]'",
    "broken": "exit 1",
    "without ensurepip": """case "$1" in -I) echo '[[3, 11, 7], false]';; *) exit 1;; esac""",
}
SAYS = {
    "old": "the virtual environment {} has Python 3.10.13, expected 3.11 or newer; deactivate it, "
    "or recreate it with a newer Python",
    "broken": "the Python in {} does not run (",
    "without ensurepip": "`{}/bin/python -m ensurepip` failed, see above. On Debian and Ubuntu, "
    "Python's venv is a separate package: run `sudo apt install python3-venv`, then delete {} and "
    "run this again",
    "gone": "VIRTUAL_ENV is set to {}, which has no bin/python; unset it (`deactivate`) to use "
    ".venv",
}


@pytest.mark.parametrize("case", SAYS)
def test_an_unusable_environment_is_refused(project, tmp_path, case):
    environment = tmp_path / "env"
    if case in PYTHONS:
        python = environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{PYTHONS[case]}\n")
        python.chmod(0o755)
    result = project.run("test", VIRTUAL_ENV=str(environment))
    assert result.returncode == 2
    assert result.stderr.startswith("run.py: " + SAYS[case].replace("{}", str(environment)))
    assert result.stdout == ""


def test_help_and_wrong_arguments_only_print_usage(project):
    asked = project.run("--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    for words in ("run.py demo", "run.py test", "pytest --world-size 4 examples", "pytest -n 4"):
        assert words in asked.stdout
    for arguments in ((), ("tests",), ("-n", "2")):
        mistake = project.run(*arguments)
        assert (mistake.returncode, mistake.stdout, mistake.stderr) == (2, "", asked.stdout)
    assert not (project.path / ".venv").exists()


def test_old_python_is_refused_with_required_version(project):
    source = (project.path / "run.py").read_text()
    ast.parse(source, feature_version=(3, 6))
    code = (
        "import sys; sys.version_info = (3, 8, 18); "
        "exec(compile(sys.stdin.read(), 'run.py', 'exec'), {'__name__': '__main__'})"
    )
    result = subprocess.run(
        [BASE_PYTHON, "-c", code], input=source, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"run.py: Python 3.11 or newer is required, this is 3.8.18 ({BASE_PYTHON}); run it with a "
        "newer one, e.g. python3.11 run.py demo\n"
    )
