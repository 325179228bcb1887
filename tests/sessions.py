"""How tests run sessions of pytest: as the outermost one, with torch imported before they begin."""

import os
import sys

# Plugins that change a run are tested on purpose, in test_other_plugins.py.
# Neither anyio nor Hypothesis is used there; both take long to import.
OFF = ("anyio", "asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout")


def set_outermost(monkeypatch):
    """A pytest that a test runs must not take itself for an xdist worker, nor for a CI run."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in OFF))
    # Ranks share the machine's few cores with the tests that run beside.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start_warm(pytester, starter, monkeypatch):
    """Have sessions of `pytester` begin with torch imported."""
    begin = pytester.popen

    def popen(command, stdout, stderr, stdin=pytester.CLOSE_STDIN, **options):
        is_pytest = tuple(command[:2]) == (sys.executable, "-mpytest")
        if not is_pytest or stdin is not pytester.CLOSE_STDIN or options:
            return begin(command, stdout=stdout, stderr=stderr, stdin=stdin, **options)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
            return starter.start(command[2:], stdout.fileno(), stderr.fileno())

    monkeypatch.setattr(pytester, "popen", popen)
