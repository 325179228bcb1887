import contextlib
import os
import sys

import pytest
from warm import WarmStarter


@pytest.fixture(scope="session")
def _warm_starter():
    with contextlib.closing(WarmStarter()) as starter:
        yield starter


@pytest.fixture(autouse=True)
def _warm_sessions(request, monkeypatch):
    """Sessions of pytester begin with torch imported, except those of tests marked ``cold``."""
    if "pytester" not in request.fixturenames or request.node.get_closest_marker("cold"):
        return
    pytester, starter = (request.getfixturevalue(name) for name in ("pytester", "_warm_starter"))
    begin = pytester.popen

    def popen(command, stdout, stderr, stdin=pytester.CLOSE_STDIN, **options):
        is_pytest = tuple(command[:2]) == (sys.executable, "-mpytest")
        if not is_pytest or stdin is not pytester.CLOSE_STDIN or options:
            return begin(command, stdout=stdout, stderr=stderr, stdin=stdin, **options)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
            return starter.start(command[2:], stdout.fileno(), stderr.fileno())

    monkeypatch.setattr(pytester, "popen", popen)


@pytest.fixture(autouse=True)
def _outermost_pytest(monkeypatch, request):
    """A pytest that a test runs must not take itself for an xdist worker, nor for a CI run."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CI"):
        monkeypatch.delenv(name, raising=False)
    if "pytester" in request.fixturenames:
        # Before what follows, since it deletes PYTEST_ADDOPTS.
        request.getfixturevalue("pytester")
    # Plugins that change a run are tested on purpose, in test_other_plugins.py.
    # Hypothesis is not used there, and takes as long to import as a small session to run.
    disabled = ("asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout")
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in disabled))
    # Ranks share the machine's few cores with the tests that run beside.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
