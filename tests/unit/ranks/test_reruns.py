"""What pytest-rerunfailures learns of a failure in a rank."""

import types

import pytest

from pytest_fsdp_comm.ranks.session.reruns import rebuild_error


def report(message, *, outcome="failed", crashed=True):
    longrepr = types.SimpleNamespace(reprcrash=types.SimpleNamespace(message=message))
    return pytest.TestReport(
        nodeid="test_it",
        location=("test_it.py", 0, "test_it"),
        keywords={},
        outcome=outcome,
        longrepr=longrepr if crashed else message,
        when="call",
    )


@pytest.mark.parametrize(
    ("message", "kind", "name", "text"),
    [
        ("ValueError: odd", ValueError, "ValueError", "odd"),
        ("rank 1: ValueError: odd", ValueError, "ValueError", "odd"),
        ("ranks 0, 2-3: KeyError: 'a: b'\nmore", KeyError, "KeyError", "'a: b'\nmore"),
        ("rank 0: torch.distributed.DistError: gone", Exception, "DistError", "gone"),
        ("rank 0: LookupError", LookupError, "LookupError", ""),
        ("ranks 0-1: assert 1 == 2", AssertionError, "AssertionError", "ranks 0-1: assert 1 == 2"),
        ("UnicodeDecodeError: bad", UnicodeDecodeError, "UnicodeDecodeError", "bad"),
        ("Exit: stop", Exception, "Exit", "stop"),
    ],
)
def test_an_error_is_rebuilt_by_name_and_text(message, kind, name, text):
    error = rebuild_error(report(message))
    assert isinstance(error, kind)
    assert type(error).__name__ == name
    assert str(error) == text


def test_headline_like_an_error_is_not_rebuilt():
    failed = report("rank 0: layers.3: +3 all_gather")
    assert type(rebuild_error(failed)).__name__ == "3"
    failed.comm_headline = "layers.3: +3 all_gather"
    error = rebuild_error(failed)
    assert isinstance(error, AssertionError)
    assert str(error) == "rank 0: layers.3: +3 all_gather"


def test_a_death_is_not_rebuilt_as_a_python_error():
    error = rebuild_error(report("rank 1 was killed by signal 9 (SIGKILL)", crashed=False))
    assert type(error).__name__ == "RankFailure"
    assert str(error) == "rank 1 was killed by signal 9 (SIGKILL)"
    assert rebuild_error(report("", outcome="passed")) is None


def test_rerunfailures_has_the_names_that_are_replaced():
    plugin = pytest.importorskip("pytest_rerunfailures")
    assert callable(plugin.runtestprotocol)
    assert plugin.pytest_runtest_protocol.__code__.co_names.count("runtestprotocol") == 1
    assert plugin.pytest_runtest_makereport.__code__.co_varnames[:2] == ("item", "call")
