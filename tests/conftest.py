"""Hypothesis profiles, and fixtures of all tests."""

import contextlib

import pytest
from hypothesis import HealthCheck, settings

# No deadline: the first example fills Unicode's tables, which takes seconds on two busy cores.
settings.register_profile("long", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("long"), max_examples=40)
settings.register_profile("quick", settings.get_profile("suite"), max_examples=15)  # `nox -s check`
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _uncompiled_projects():
    """Write no bytecode: tests change files within a second, which its time stamps do not show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


@pytest.fixture(scope="session")
def _warm_starter():
    """Return a process that has imported torch; only tests that start sessions need it."""
    # Imported here, because some tests copy this file without that one.
    from warm import WarmStarter

    with contextlib.closing(WarmStarter()) as starter:
        yield starter


@pytest.fixture
def backend(request):
    """Return the backend that `oracle.gloo_and_fake` parametrizes the test with."""
    return request.param
