import signal
from types import SimpleNamespace

import pytest
import running
from sessions import OFF, set_outermost, start_warm

from pytest_fsdp_comm.ranks.wire.load import extend_under_load


@pytest.fixture(scope="session", autouse=True)
def _default_signals():
    """What a background job ignores, as under ``nohup``, all that it starts would ignore too.

    A handler is no program's but this one's.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _warm_python(_warm_starter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "PYTHON", _warm_starter.python)
        yield


@pytest.fixture(scope="module")
def run_session(tmp_path_factory, _warm_starter):
    """Runs a session once for several tests: ``run_session(source, *arguments)``.

    Other files are given by name, without ``.py``. The result has `output`, of both streams,
    `path` and `status`.
    """

    def run(source, *arguments, plugins=(), **files):
        path = tmp_path_factory.mktemp("session")
        for name, text in {**files, "test_it": source}.items():
            (path / f"{name}.py").write_text(text)
        (path / "pytest.ini").write_text("[pytest]\n")
        off = " ".join(f"-p no:{name}" for name in OFF if name not in plugins)
        with pytest.MonkeyPatch.context() as patch, (path / "output").open("w") as output:
            for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "CI"):
                patch.delenv(name, raising=False)
            patch.setenv("PYTEST_ADDOPTS", f"{off} -p no:cacheprovider")
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.chdir(path)
            process = _warm_starter.start(arguments, output.fileno(), output.fileno())
            status = process.wait(timeout=extend_under_load(300))
        output = (path / "output").read_text()
        return SimpleNamespace(output=output, path=path, status=status)

    return run


@pytest.fixture(autouse=True)
def _warm_sessions(request, monkeypatch):
    """Sessions of pytester begin with torch imported, except those of tests marked ``cold``."""
    if "pytester" not in request.fixturenames or request.node.get_closest_marker("cold"):
        return
    pytester, starter = (request.getfixturevalue(name) for name in ("pytester", "_warm_starter"))
    start_warm(pytester, starter, monkeypatch)


@pytest.fixture(autouse=True)
def _outermost_pytest(monkeypatch, request):
    """A pytest that a test runs must not take itself for an xdist worker, nor for a CI run."""
    if "pytester" in request.fixturenames:
        # Before what follows, since it deletes PYTEST_ADDOPTS.
        request.getfixturevalue("pytester")
    set_outermost(monkeypatch)
