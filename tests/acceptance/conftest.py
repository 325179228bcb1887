import pytest


@pytest.fixture(autouse=True)
def _outermost_pytest(monkeypatch):
    """A pytest that a test runs must not take itself for an xdist worker, nor for a CI run."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS", "CI"):
        monkeypatch.delenv(name, raising=False)
    # Ranks share the machine's few cores with the tests that run beside.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
