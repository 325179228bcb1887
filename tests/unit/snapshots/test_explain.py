"""Which arguments of a run its accept command repeats."""

import pytest

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
