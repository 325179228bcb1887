"""Which tests launched processes must agree on, and how a difference reads."""

from pytest_fsdp_comm.ranks.launched.ranks import describe_difference, positions
from pytest_fsdp_comm.ranks.wire.messages import PlannedTest


def named(text, settings="2 ranks"):
    return [PlannedTest(nodeid=name, settings=settings) for name in text]


def test_the_leaders_order_is_followed():
    assert positions(named("abcd"), named("dabc")) == [1, 2, 3, 0]
    assert positions([], []) == []


def test_a_test_collected_twice_counts_as_two():
    assert positions(named("aba"), named("aab")) == [0, 2, 1]
    assert positions(named("aba"), named("abb")) is None
    assert positions(named("aa"), named("a")) is None
    assert describe_difference(named("aba"), named("abb")) == (
        "lacks 1 of rank 0's 3 tests:\n    a\n  and has 1 that rank 0 lacks:\n    b"
    )


def test_equal_sets_do_not_differ_in_any_order():
    assert describe_difference(named("abc"), named("cab")) == ""


def test_the_first_of_many_are_named():
    assert describe_difference(named("abcdef"), []) == (
        "lacks 6 of rank 0's 6 tests:\n    a\n    b\n    c\n    d\n    ... and 2 more"
    )


def test_a_test_with_other_settings_is_the_same_test():
    theirs = [*named("a"), *named("b", settings="")]
    ours = [*named("a", settings="4 ranks"), *named("b")]
    assert positions(theirs, ours) is None
    assert describe_difference(theirs, ours) == (
        "runs 2 in another way:\n    a on 4 ranks, rank 0 on 2 ranks\n"
        "    b on 2 ranks, rank 0 on no rank"
    )
