"""The first line of a failure."""

from dataclasses import replace

import pytest
from sample_profiles import profile, twice

from pytest_fsdp_comm.errors import IncompleteRecordingError
from pytest_fsdp_comm.snapshots.differences import explain_profiles
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.explain import shorten_error


@pytest.mark.parametrize(
    ("recorded", "now", "said"),
    [
        ("2.13.0+cpu", "2.15.0+cu130", ", recorded with torch 2.13.0, this is 2.15.0"),
        ("2.13.0", "2.13.0", ""),
        # Builds of one version do not differ in what they send.
        ("2.13.0+cpu", "2.13.0+cu130", ""),
        ("", "2.13.0", ""),
    ],
)
def test_another_torch_is_named_in_the_first_line(recorded, now, said):
    old = SnapshotText.from_profile(replace(profile(), torch_version=recorded), where="old")
    new = replace(twice(profile()), torch_version=now)
    # The version comes out of the file, whose first line is free otherwise.
    reviewed = SnapshotText(str(old), where="old").profile
    failure = explain_profiles((reviewed, new), where="old.comm")
    assert failure.head == f"comm_mode differs from old.comm{said}"
    free = str(old).replace(" | torch", " | a note of ours: torch")
    assert SnapshotText(free, where="old").profile.torch_version == ""


def test_headline_of_an_incomplete_recording_names_the_first_gap():
    error = IncompleteRecordingError("the recording has gaps:\n  the first\n  the second")
    assert shorten_error(error, where="") == "the first"
    assert shorten_error(ValueError("one\ntwo"), where="") == "one"
