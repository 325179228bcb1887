"""Options that take a path never move pytest's root directory without a word.

pytest chooses it before it knows a plugin's options: the value of one, as a word of its own, is to
it a path of tests.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import running

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

    def merged_profile(self):
        return sample_profiles.profile({layers})
"""
STARTED_THREAD = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
)
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
        timeout=300,
    )


def check_compared_as_here(done, project):
    assert f"rootdir: {project}\n" in done.stdout, done.stdout + done.stderr
    assert "configfile: pytest.ini\n" in done.stdout
    assert "differs from snapshots/tests/test_step/test_step.ws1.comm" in done.stdout
    assert done.returncode == 1


def check_refused(done, project, option, path):
    path = shlex.quote(str(path))
    assert done.stderr.strip() == (
        f"ERROR: {option} {path}: pytest chooses its root directory before it knows a plugin's "
        f"options, and took {path} for a place of tests: the root directory became "
        f"{project.parents[2]} instead of {project} with pytest.ini; write {option}={path}"
    )
    assert done.stdout == ""
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("glue", [" ", "="], ids=["space", "equals"])
@pytest.mark.parametrize(("option", "left"), OPTIONS.items(), ids=OPTIONS)
def test_a_path_option_never_moves_the_root_directory_unnoticed(project, option, left, glue, place):
    top = project if place == "inside" else project.parents[2]
    new, existing = (top / f"of ours{option}{glue.strip()}" / name for name in ("new", "existing"))
    existing.parent.mkdir()
    existing.mkdir() if left else existing.touch()
    for path in (existing, new, new):
        was_there = path.exists()
        done = run(project, *([option, path] if glue == " " else [f"{option}={path}"]))
        if glue == " " and place == "outside" and was_there:
            check_refused(done, project, option, path)
        else:
            check_compared_as_here(done, project)
            assert (path / left).exists()
            if option == "--comm-report":
                # The page says how to repeat the run, by when the directory exists.
                assert f"{option}={top}" in (path / left).read_text()


def test_a_path_is_refused_from_the_environment_and_from_a_file_too(project, tmp_path):
    path = project.parents[1]
    (tmp_path / "arguments").write_text(f"--comm-artifacts\n{path}\n")
    for done in (
        run(project, PYTEST_ADDOPTS=f"--comm-artifacts {path}"),
        run(project, f"@{tmp_path / 'arguments'}"),
    ):
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert (
            f"instead of {project} with pytest.ini; write --comm-artifacts={path}\n" in done.stderr
        )
    done = run(project, "--help", "--comm-artifacts", path)
    assert done.returncode == 0
    assert "--comm-artifacts=DIR" in done.stdout


def test_two_refused_paths_are_both_named_with_the_wrong_ini_file(project, tmp_path):
    (tmp_path / "tox.ini").write_text("[pytest]\n")
    (report := tmp_path / "report").mkdir()
    arguments = ("--comm-summary", "a b.md", "--comm-report", report)
    assert run(project, "--comm-artifacts=kept", *arguments).stderr.strip() == (
        f"ERROR: --comm-summary 'a b.md' --comm-report {report}: pytest chooses its root directory "
        f"before it knows a plugin's options, and took 'a b.md' {report} for a place of tests: the "
        f"root directory became {tmp_path} with tox.ini instead of {project} with pytest.ini; "
        f"write --comm-summary='a b.md' --comm-report={report}"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        # Wherever else it looks, this decides.
        ("--comm-report", "{outside}", "-c", "pytest.ini"),
        # The first path with an ini file above it decides.
        ("tests", "--comm-report", "{outside}"),
        ("--comm-report", "{outside}", "tests/test_step.py::test_step"),
    ],
)
def test_a_path_that_moves_nothing_is_accepted(project, tmp_path, arguments):
    given = [argument.format(outside=tmp_path) for argument in arguments]
    check_compared_as_here(run(project, *given), project)
    assert (tmp_path / "index.html").exists()


def test_an_ini_file_may_set_a_path_as_a_separate_word(project, tmp_path):
    ini = (project / "pytest.ini").read_text()
    option = f"addopts = --comm-artifacts {tmp_path} "
    (project / "pytest.ini").write_text(ini.replace("addopts = ", option))
    try:
        check_compared_as_here(run(project), project)
    finally:
        (project / "pytest.ini").write_text(ini)
    assert (tmp_path / "received").exists()


def test_a_root_moved_by_another_plugins_option_is_not_blamed_on_ours(project, tmp_path):
    plugin = "def pytest_addoption(parser):\n    parser.addoption('--other')\n"
    (tmp_path / "other.py").write_text(plugin)
    (tmp_path / "tox.ini").write_text("[pytest]\n")
    path = f"{tmp_path}:{project / 'src'}:{ROOT / 'tests'}"
    arguments = ("-p", "other", "--other", tmp_path, "--comm-report", "tests")
    done = run(project, *arguments, PYTHONPATH=path)
    assert f"rootdir: {tmp_path}\n" in done.stdout
    assert done.stderr == ""


def test_spawned_ranks_resolve_paths_as_their_session_does(project, tmp_path):
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
        assert "ranks are started as new pytest processes" in done.stdout
        assert "2 failed" in done.stdout, done.stdout
        assert done.stdout.count("there is no snapshot") == 2
