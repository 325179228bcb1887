"""The private names of subtests that merging their reports relies on, and errors without them."""

import inspect
import json
import types

import pytest

from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.ranks.rank.plugin import capture_subtests, is_subtest
from pytest_fsdp_comm.ranks.session.verdict import restore_and_name_subtest

subtests_of_pytest = pytest.importorskip("_pytest.subtests", reason="pytest 9 has subtests")


@pytest.fixture
def data(request):
    """A serialized report of a subtest, after its way through JSON."""
    config = request.config
    item = request.node
    report = subtests_of_pytest.SubtestReport._new(
        pytest.TestReport(item.nodeid, item.location, {}, "passed", None, "call"),
        subtests_of_pytest.SubtestContext(msg="name", kwargs={"i": (1, 2), "s": "x"}),
        None,
        None,
    )
    found = config.hook.pytest_report_to_serializable(config=config, report=report)
    return json.loads(json.dumps(found, default=repr))


def load(request, data):
    config = request.config
    return config.hook.pytest_report_from_serializable(config=config, data=data)


def test_a_report_keeps_its_name_and_arguments(request, data):
    report = load(request, data)
    assert is_subtest(report)
    named = restore_and_name_subtest(report, data)
    assert report.context.msg == "name"
    assert report._sub_test_description() == "[name] (i=(1, 2), s='x')"
    assert "name" in named
    assert named == restore_and_name_subtest(load(request, data), data)
    data["_subtest.context"]["kwargs"]["i"] = "(1, 3)"
    assert named != restore_and_name_subtest(load(request, data), data)


def test_a_report_of_a_phase_is_not_a_subtest(request):
    item = request.node
    assert not is_subtest(pytest.TestReport(item.nodeid, item.location, {}, "passed", None, "call"))


@pytest.mark.parametrize("missing", ["_subtest.context", "msg", "context"])
def test_a_moved_report_class_is_reported(request, data, missing):
    report = load(request, data)
    if missing == "context":
        del report.context
    else:
        (data if missing in data else data["_subtest.context"]).pop(missing)
    with pytest.raises(UpstreamChangedError) as caught:
        restore_and_name_subtest(report, data)
    assert f"pytest {pytest.__version__} no longer has SubtestReport.context" in str(caught.value)


def test_capturing_is_looked_up_where_it_is_replaced(monkeypatch):
    using = subtests_of_pytest._SubTestContextManager.__enter__
    assert "capturing_output" in using.__code__.co_names
    original = subtests_of_pytest.capturing_output
    assert list(inspect.signature(original).parameters) == ["request"]
    assert {"out", "err"} <= set(subtests_of_pytest.Captured.__dataclass_fields__)
    assert {"_capture_fixture"} <= set(inspect.unwrap(original).__code__.co_consts)

    monkeypatch.setattr(subtests_of_pytest, "capturing_output", original)  # to be restored
    capture_subtests(lambda captured: pytest.fail(f"not with {captured}"))
    assert subtests_of_pytest.capturing_output is not original


def test_moved_capturing_is_reported(monkeypatch):
    monkeypatch.delattr(subtests_of_pytest, "capturing_output")
    with pytest.raises(
        UpstreamChangedError, match=r"no longer has _pytest\.subtests\.capturing_output,"
    ):
        capture_subtests(lambda _: types.SimpleNamespace())
