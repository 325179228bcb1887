import pytest


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
