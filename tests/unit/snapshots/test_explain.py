"""Which arguments of a run its accept command repeats, and what a failure's first line says."""

from dataclasses import replace

import pytest
from sample_profiles import profile, twice

from pytest_fsdp_comm.snapshots.differences import explain_profiles
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.explain import repeated_options

TESTS = ("tests", "tests/test_a.py::test_one")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", ""),
        ("tests", ""),
        ("--world-size 4 tests", "--world-size 4"),
        ("--world-size=4", "--world-size=4"),
        ("-x -vv --tb=short -k not_this --maxfail 1 -rA -n2 -n 4 --lf", ""),
        ("-xvs --color yes --comm-artifacts out --comm-summary s.md -kname", ""),
        ("-c o.ini --confcutdir=. -o a=b", "-c o.ini --confcutdir=. -o a=b"),
        ("--rootdir . -x", "--rootdir ."),
        ("-p no:cacheprovider -pno:xdist -p myplugin", "-p myplugin"),
        ("--width 8 --few tests/test_a.py::test_one", "--width 8 --few"),
        ("--where tests tests", "--where tests"),
        ("-W error --import-mode importlib", "-W error --import-mode importlib"),
        ("--comm-backend fake --comm-timeout 9", "--comm-backend fake --comm-timeout 9"),
    ],
)  # fmt: skip
def test_what_chooses_and_reports_is_left_out(given, kept):
    arguments = given.split()
    selected = [argument for argument in arguments if argument in TESTS]
    # argparse takes the first of two equal words for the value of an option.
    selected = selected[-1:] if "--where" in arguments else selected
    assert repeated_options(arguments, selected) == kept.split()


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
    old = SnapshotText.of(replace(profile(), torch_version=recorded), where="old")
    new = replace(twice(profile()), torch_version=now)
    # The version comes out of the file, whose first line is free otherwise.
    reviewed = SnapshotText(str(old), where="old").profile
    found = explain_profiles((reviewed, new), where="old.comm")
    explanation = found.explanation
    assert explanation.short[0] == explanation.full[0] == f"comm_mode differs from old.comm{said}"
    free = str(old).replace(" | torch", " | a note of ours: torch")
    assert SnapshotText(free, where="old").profile.torch_version == ""
