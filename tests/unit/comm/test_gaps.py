"""Gaps of recordings: how ranks' are merged, and what a comparison says of them."""

import dataclasses

import pytest

from pytest_fsdp_comm.comm.events import Gap, Recording
from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.errors import IncompleteRecordingError
from pytest_fsdp_comm.snapshots.extension import check_completeness
from pytest_fsdp_comm.text.codec import from_json, to_json

UNSEEN = Gap(kind="unseen", text="1 collective of thread 'loader'")
READ = Gap(kind="value_dependent", text="a.py:1 reads the values of a tensor (item)")


def recording(rank, *gaps):
    return Recording(rank=rank, world_size=4, backend="gloo", torch_version="2", gaps=gaps)


def merged(*gaps_of):
    return merge([fold(recording(rank, *gaps)) for rank, gaps in enumerate(gaps_of)])


def refusal(profile, *, allowed=frozenset()):
    with pytest.raises(IncompleteRecordingError) as caught:
        check_completeness(profile, allowed=allowed)
    return str(caught.value).splitlines()


def test_gaps_are_part_of_the_json():
    assert load_recordings(dump_recordings([recording(0, UNSEEN, READ)]))[0].gaps == (UNSEEN, READ)
    profile = merged([UNSEEN], [])
    assert from_json(type(profile), to_json(profile), where="profile").gaps == profile.gaps


def test_equal_gaps_become_one_which_says_whose_it_is():
    assert merged([UNSEEN], [READ, UNSEEN], [], [UNSEEN]).gaps == (
        dataclasses.replace(UNSEEN, ranks=(0, 1, 3)),
        dataclasses.replace(READ, ranks=(1,)),
    )


def test_a_gap_of_all_ranks_names_none():
    assert merged([UNSEEN], [UNSEEN]).gaps == (UNSEEN,)


def test_gaps_are_not_compared():
    assert merged([UNSEEN]) == merged([])


def test_a_refusal_fits_into_what_pytest_shows():
    gaps = [dataclasses.replace(UNSEEN, text=f"gap {number}") for number in range(9)]
    lines = refusal(merged(gaps, []))
    assert len(lines) <= 8
    assert lines[1:6] == [*(f"  gap {number} (on rank 0)" for number in range(4)), "  and 5 more"]


def test_each_switch_accepts_its_own_kind_only():
    both = merged([UNSEEN, READ])
    assert refusal(both)[1] == f"  {UNSEEN.text}"
    assert refusal(both, allowed={"value_dependent"})[1] == f"  {UNSEEN.text}"
    assert refusal(both, allowed={"unseen"})[1] == f"  {READ.text}"
    check_completeness(both, allowed={"unseen", "value_dependent"})


def test_an_idle_model_is_refused_until_it_is_allowed():
    idle = Gap(kind="idle_model", text="no module of the Sequential passed to comm_mode ran")
    assert refusal(merged([], [idle]))[1] == f"  {idle.text} (on rank 1)"
    assert refusal(merged([idle], [idle]), allowed={"value_dependent"})[1] == f"  {idle.text}"
    check_completeness(merged([idle], [idle]), allowed={"idle_model"})


def test_recording_without_gaps_has_no_note():
    check_completeness(merged([], []))
