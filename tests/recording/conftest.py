"""Fixtures of the recording tests."""

import pytest


@pytest.fixture
def backend(request):
    """Parametrized by `oracle.gloo_and_fake`, which names the tests by it."""
    return request.param
