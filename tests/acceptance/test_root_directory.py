"""Options that take a path leave pytest's root directory alone if they are written with ``=``.

pytest chooses it before it knows a plugin's options, and mistakes an existing path given as a
separate argument for a test path.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import running

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

ROOT = Path(__file__).parents[2]
OPTIONS = {"--comm-artifacts": "received", "--comm-report": "index.html", "--comm-summary": ""}
"""What each leaves in its directory; the last one's path is a file."""

INI = f"[pytest]\npythonpath = src {ROOT / 'tests'}\naddopts = --strict-markers\nmarkers = mine\n"
TEST = """
import pytest
import training

@pytest.mark.mine
def test_step(comm_snapshot):
    assert training.Recorded() == comm_snapshot
"""
TRAINING = """
import sample_profiles
import sample_files

class Recorded:
    recording = sample_files.recording()

    def merged_profile(self, *, allow_divergence=False):
        return sample_profiles.profile({layers})
"""
RANKS = """
import pytest

@pytest.mark.distributed(world_size=1)
@pytest.mark.parametrize("number", [1, 2])
def test_ranks(comm_snapshot, number):
    import training
    assert training.Recorded() == comm_snapshot
"""
UNSAFE = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project in a sub-folder, whose test no longer sends what its snapshot says."""
    project = tmp_path_factory.mktemp("outside") / "mono/packages/training"
    for folder in ("tests", "src"):
        (project / folder).mkdir(parents=True)
    (project / "pytest.ini").write_text(INI)
    (project / "conftest.py").write_text("import training\n")
    (project / "tests/test_step.py").write_text(TEST)
    (project / "src/training.py").write_text(TRAINING.format(layers=3))
    assert run(project, "--snapshot-update").returncode == 0
    (project / "src/training.py").write_text(TRAINING.format(layers=4))
    return project


def run(project, *arguments, **variables):
    names = ("asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout", "cacheprovider")
    off = [f"-pno:{name}" for name in names]
    return subprocess.run(
        [running.PYTHON, "-m", "pytest", *off, *arguments],
        cwd=project,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=extend_under_load(300),
    )


def check_compared_as_here(done, project):
    assert f"rootdir: {project}\n" in done.stdout, done.stdout + done.stderr
    assert "configfile: pytest.ini\n" in done.stdout
    assert "differs from snapshots/tests/test_step/test_step.ws1.comm" in done.stdout
    assert done.returncode == 1


def test_path_options_with_equals_sign_keep_root(project, tmp_path):
    """Whether the paths exist or not, and elsewhere than the project."""
    given = [f"{option}={tmp_path}/{option}" for option in OPTIONS]
    for _ in ("new", "existing"):
        check_compared_as_here(run(project, *given), project)
        for option, left in OPTIONS.items():
            assert (tmp_path / option / left).exists()


def test_report_repeats_path_options_with_equals_sign(project, tmp_path):
    """A path that was new when the run began exists when its command is repeated."""
    check_compared_as_here(run(project, "--comm-report", tmp_path / "new"), project)
    assert f"--comm-report={tmp_path}" in (tmp_path / "new/index.html").read_text()


@pytest.mark.parametrize("settings", ["", "[pytest]\nmarkers = mine\n"])
def test_record_command_keeps_root_of_monorepo(project, tmp_path, settings):
    """pytest would use a package's own configuration if its test is the only argument."""
    mono = tmp_path / "mono"
    shutil.copytree(project.parents[1], mono)
    if settings:
        (mono / "pytest.ini").write_text(settings)
    path = {"PYTHONPATH": f"{mono}/packages/training/src:{ROOT}/tests"}
    (command,) = re.findall("record it: pytest (.*)", run(mono, **path).stdout)
    assert run(mono, *shlex.split(command), **path).returncode == 0
    done = run(mono, **path)
    assert done.returncode == 0, command + done.stdout


# Each rank imports torch, which takes half a minute; test_spawned_ranks.py runs shorter tests.
@pytest.mark.release
def test_spawned_ranks_resolve_paths_like_session(project, tmp_path):
    """Though it exists by then, and where they look for it the project would not be found."""
    (project / "test_ranks.py").write_text(RANKS)
    conftest = (project / "conftest.py").read_text()
    (project / "conftest.py").write_text(conftest + UNSAFE)
    option, path = ("--comm-artifacts", tmp_path / "kept")
    try:
        given = run(project, option, path, "-k", "ranks")
        path.rename(tmp_path / "first")
        from_environment = run(project, "-k", "ranks", PYTEST_ADDOPTS=f"{option} {path}")
    finally:
        (project / "conftest.py").write_text(conftest)
        (project / "test_ranks.py").unlink()
    for done in (given, from_environment):
        assert "start as new pytest processes" in done.stdout
        assert "2 failed" in done.stdout, done.stdout
        assert done.stdout.count("there is no snapshot") == 2
