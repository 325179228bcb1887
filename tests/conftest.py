"""How the tests' examples are drawn, and on what they run."""

import pytest
from hypothesis import HealthCheck, settings

# A runner with two busy cores takes seconds for what takes milliseconds elsewhere: the first draw
# fills Unicode's tables.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("suite"), max_examples=15)  # `nox -s check`
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _uncompiled_projects():
    """Tests change files within a second, which the time stamps of compiled ones cannot tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


@pytest.fixture
def backend(request):
    """Parametrized by `oracle.gloo_and_fake`, which names the tests by it."""
    return request.param
