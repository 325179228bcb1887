"""Let tests run pytest sessions as outermost sessions, in processes that have imported torch."""

import os
import sys

# test_other_plugins.py tests plugins that change a run. Sessions use neither anyio nor Hypothesis,
# which take long to import.
OFF = ("anyio", "asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout")


def set_outermost(monkeypatch):
    """Keep a test's pytest sessions from running as an xdist worker, or as in CI."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in OFF))
    # Ranks share the machine's few cores with tests of other workers.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start_warm(pytester, starter, monkeypatch):
    """Start sessions of `pytester` in processes that have imported torch."""
    begin = pytester.popen

    def popen(command, stdout, stderr, stdin=pytester.CLOSE_STDIN, **options):
        is_pytest = tuple(command[:2]) == (sys.executable, "-mpytest")
        if not is_pytest or stdin is not pytester.CLOSE_STDIN or options:
            return begin(command, stdout=stdout, stderr=stderr, stdin=stdin, **options)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
            return starter.start(command[2:], stdout.fileno(), stderr.fileno())

    monkeypatch.setattr(pytester, "popen", popen)
