import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fsdp_comm.command_line.main import main


class Ran:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def lines(self):
        return self.out.splitlines()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Change to a directory that pytest uses as its root directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.fixture
def fsdp_comm(project, capsys):  # noqa: ARG001  # where it runs
    def run(*arguments):
        capsys.readouterr()
        status = main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run


@pytest.fixture
def write(project):
    def write(path, text):
        file = project / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            file.write_text(text)
        return file

    return write


@pytest.fixture
def git(project, monkeypatch):
    """Run git in a new repository, with the installed program as diff driver."""
    for name in [*os.environ]:
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    programs = project / "bin"
    programs.mkdir()
    program = programs / "fsdp-comm"
    root = Path(__file__).parents[3]
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m pytest_fsdp_comm "$@"\n'
    )
    program.chmod(0o755)
    # A copy of the installed program, because a test removes it.
    directories = [
        directory
        for directory in os.environ["PATH"].split(os.pathsep)
        if not (Path(directory) / "fsdp-comm").exists()
    ]
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), *directories]))

    def run(*arguments, status=0):
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607  # the one that users have
            capture_output=True,
            text=True,
            check=False,
            cwd=project,
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    try:
        run("init", "-q", "-b", "main")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    run("config", "user.name", "A Name")
    run("config", "user.email", "a@b.example")
    (project / ".gitignore").write_text("/bin/\n")
    return run
