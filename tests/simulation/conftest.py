import pytest
from sessions import set_outermost, start_warm


@pytest.fixture(autouse=True)
def _warm_sessions(request):
    # For all others the environment stays as it is: each change starts their ranks anew.
    if "pytester" in request.fixturenames:
        names = ("pytester", "_warm_starter", "monkeypatch")
        pytester, starter, monkeypatch = map(request.getfixturevalue, names)
        set_outermost(monkeypatch)
        start_warm(pytester, starter, monkeypatch)
