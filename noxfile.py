"""Define the tasks; tests/README.md describes the test tiers from `check` to `release`."""

import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["check"]
UNIT = ("tests/unit", "tests/typing")
MATRIX = runpy.run_path("tests/matrix.py")["COMBINATIONS"]


@nox.session
def check(session: nox.Session) -> None:
    """Run lint, format, types, layers and the quick tests, which start no rank."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("mypy", "benchmarks/run.py")
    session.run("lint-imports")
    quick = ("-m", "not costly and not release", "--hypothesis-profile", "quick")
    session.run("pytest", "-q", "-n", "2", *quick, *(session.posargs or UNIT))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run the unit tests with mutated and hostile files, all examples and more random plans."""
    long = ("-m", "not large", "--hypothesis-profile", "long")
    session.run("pytest", "-q", "-n", "2", *long, *(session.posargs or UNIT))
    session.run("python", "tests/fuzzing.py", "--mutations", "50000", "--seed", "7")
    plans = "tests/acceptance/test_random_plans.py"
    session.run("pytest", "-q", "-m", "", plans, env={"RANDOM_PLANS_TIMES": "10"})


@nox.session
def record(session: nox.Session) -> None:
    """Run the tests of recordings and trees, most of them on the fake group."""
    folders = [
        f"tests/{name}"
        for name in ("recording", "sharding", "simulation", "regressions", "history")
    ]
    session.run("pytest", "-q", "-n", "2", *(session.posargs or folders))


@nox.session
def accept(session: nox.Session) -> None:
    """Run everything that a change needs, with real ranks."""
    session.run("pytest", "--world-size", "4", "examples")
    session.run("pytest", "-n", "4", "--dist", "loadfile", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Run the long tests that only a release needs; `accept` runs a smaller case of each."""
    session.run("pytest", "-n", "4", "--dist", "worksteal", "-m", "release", *session.posargs)


@nox.session
def busy(session: nox.Session) -> None:
    """Run all tests on a busy machine: next to ten endless processes of the lowest priority."""
    endless = ("nice", "-n", "19", sys.executable, "-c", "while True: pass")
    load = [subprocess.Popen(endless) for _ in range(10)]  # noqa: S603  # our own command
    try:
        session.run("pytest", "-q", "-n", "2", "--dist", "loadfile", *session.posargs)
    finally:
        for process in load:
            process.kill()


@nox.session
def layouts(session: nox.Session) -> None:
    """Run the examples and the zoo of real models on simulated ranks, with the largest models."""
    session.run(
        "pytest", "-m", "", *(session.posargs or ("examples", "tests/simulation/test_zoo.py"))
    )


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the tests of frameworks and the code of their pages, as CONTRIBUTING.md says."""
    # Tests of missing frameworks are skipped, so check first that all are installed.
    names = "accelerate, lightning, megatron_fsdp, nemo_automodel, peft, torchao, trl"
    session.run("python", "-c", f"import {names}, torchtitan.protocols.train_spec")
    page = "tests/acceptance/test_frameworks_page.py"
    session.run("pytest", "-n", "2", *(session.posargs or ("tests/frameworks", page)))


@nox.session
def typed(session: nox.Session) -> None:
    """Check a user's project with pyright in strict mode; ``check`` does so with mypy."""
    session.run("pyright", "--project", "tests/typing/project")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site in build/docs; with ``-- links``, check external links, too."""
    session.run("sphinx-build", "-W", "--keep-going", "-n", "docs", "build/docs")
    if "links" in session.posargs:
        session.run("sphinx-build", "-q", "-b", "linkcheck", "docs", "build/links")


@nox.session
def sdist(session: nox.Session) -> None:
    """Run the unit tests of the source distribution, unpacked outside this checkout."""
    with tempfile.TemporaryDirectory() as place:
        session.run("python", "-m", "build", "--no-isolation", "--sdist", "--outdir", place, ".")
        (archive,) = Path(place).glob("*.tar.gz")
        session.run("tar", "xzf", str(archive), "-C", place, external=True)
        unpacked = Path(place) / archive.name.removesuffix(".tar.gz")
        with session.chdir(unpacked):
            tests = ("-q", "-n", "2", "tests/unit", *session.posargs)
            session.run("python", "-m", "pytest", *tests, env={"PYTHONPATH": str(unpacked)})


@nox.session
def cover(session: nox.Session) -> None:
    """Measure branch coverage, in ranks, too."""
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report", "--skip-covered")


@nox.session(venv_backend="venv")
@nox.parametrize(
    ("python", "record"), [nox.param(pins[0], name, id=name) for name, pins in MATRIX.items()]
)
def matrix(session: nox.Session, record: str) -> None:
    """Run the examples and the tests marked ``upstream`` with other versions; see tests/matrix.py.

    Set ``PIP_EXTRA_INDEX_URL`` to the index of CPU builds to save several GB of CUDA libraries for
    each version.
    """
    _, *pinned = MATRIX[record]
    session.install(*pinned, "-e", ".[test]")
    try:
        session.run("python", "tests/matrix.py", f"docs/matrix/{record}.json")
    finally:
        session.run("python", "docs/matrix_table.py")
        # The environment has several GB, and no later run needs it.
        shutil.rmtree(session.virtualenv.location)
