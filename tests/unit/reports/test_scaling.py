"""The table of what a rank sends at several sizes, and what is told of it."""

import pytest

from pytest_fsdp_comm.reports.scaling import Scaling, Size

MIB = 2**20


def size(world_size, numbers):
    return Size(world_size=world_size, outcome="none", numbers=numbers)


def test_the_table_has_what_is_known_of_each_size():
    one = size(8, {"calls": 9, "bytes": 4 * MIB, "padding": 0, "peak gathered": MIB})
    other = size(64, {"calls": 9, "bytes": 5 * MIB, "peak gathered": MIB})
    sizes = (one, other, Size(world_size=512, outcome="failed: AssertionError"))
    assert list(Scaling(test="t.py::t", sizes=sizes).lines()) == [
        "t.py::t",
        "  ranks  calls    bytes    padding  peak gathered  snapshot",
        "      8      9  4.0 MiB        0 B        1.0 MiB  none",
        "     64      9  5.0 MiB  not known        1.0 MiB  none",
        "    512                                            failed: AssertionError",
        "  grows: bytes 4.0 -> 5.0 MiB (+25 %) from 8 to 64 ranks",
    ]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"calls": 9, "bytes": MIB}, {"calls": 9, "bytes": MIB // 2}, None),
        ({"seconds without overlap": 1.0}, {"seconds without overlap": 2.0}, None),
        (
            {"calls": 3, "calls of all_reduce[dp]": 1},
            {"calls": 9, "calls of all_reduce[dp]": 7},
            "calls of all_reduce[dp] 1 -> 7 (x7.0)",
        ),
        ({"calls": 3}, {"calls": 4, "calls of send[pp]": 1}, "calls of send[pp] 0 -> 1"),
        (
            {"peak gathered": MIB},
            {"peak gathered": 2 * MIB},
            "peak gathered 1.0 -> 2.0 MiB (+100 %)",
        ),
        (
            {"bytes": MIB, "padding": 0, "bytes without padding": MIB},
            {"bytes": 2 * MIB, "padding": MIB, "bytes without padding": MIB},
            "padding 0 -> 1.0 MiB",
        ),
    ],
)
def test_growth_that_should_be_flat_is_told(first, second, told):
    growth = Scaling(test="t", sizes=(size(8, first), size(64, second))).growth()
    expected = "nothing grows that should be flat"
    assert growth == [expected if told is None else f"grows: {told} from 8 to 64 ranks"]


def test_one_size_says_nothing_of_growth():
    sizes = (size(8, {"calls": 1}), Size(world_size=64, outcome="not run"))
    assert Scaling(test="t", sizes=sizes).growth() == []
