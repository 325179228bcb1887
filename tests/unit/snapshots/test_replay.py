"""The private names of syrupy that ranks rely on, and the error if one is missing."""

import types

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.session import SnapshotSession

from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.snapshots.replay import _get_session_attribute, _get_syrupy_session


@pytest.mark.upstream
def test_syrupy_has_the_private_names_that_are_used(pytestconfig, snapshot):
    session = _get_syrupy_session(pytestconfig)
    assert isinstance(session, SnapshotSession)
    assert _get_session_attribute(session, "_assertions") is session._assertions
    assert isinstance(snapshot, SnapshotAssertion)
    assert snapshot._executions == 0
    # What is replaced in a rank is looked up on the session at each call.
    assert callable(session.recall_snapshot)
    assert callable(session.queue_snapshot_write)
    assert callable(session.ran_item)
    assert _get_session_attribute(session, "_worker_reports") == []


def test_a_name_that_moved_is_named():
    plugins = types.SimpleNamespace(has_plugin=lambda _: True)
    with pytest.raises(UpstreamChangedError) as caught:
        _get_syrupy_session(types.SimpleNamespace(pluginmanager=plugins))
    assert "syrupy" in str(caught.value)
    assert "no longer has config._syrupy, which snapshots in ranks rely on" in str(caught.value)
    with pytest.raises(UpstreamChangedError, match=r"no longer has SnapshotSession\._assertions,"):
        _get_session_attribute(types.SimpleNamespace(), "_assertions")


def test_an_option_that_is_no_truth_value_is_refused():
    snapshot = object.__new__(CommSnapshot)
    for value in (None, "no", 0):
        with pytest.raises(TypeError, match=f"activation_nbytes={value!r}: expected True or False"):
            snapshot(activation_nbytes=value)
