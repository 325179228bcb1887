"""Which tests launched processes must agree on, and how a difference reads."""

from pytest_fsdp_comm.ranks.launched import describe_difference, find_test_indices


def test_the_leaders_order_is_followed():
    assert find_test_indices("abcd", "dabc") == [1, 2, 3, 0]
    assert find_test_indices([], []) == []


def test_a_test_collected_twice_counts_as_two():
    assert find_test_indices("aba", "aab") == [0, 2, 1]
    assert find_test_indices("aba", "abb") is None
    assert find_test_indices("aa", "a") is None
    assert describe_difference("aba", "abb") == (
        "did not collect 1 of rank 0's 3 tests:\n    a\n  and collected 1 that rank 0 did not:"
        "\n    b"
    )


def test_equal_sets_do_not_differ_in_any_order():
    assert describe_difference("abc", "cab") == ""


def test_the_first_of_many_are_named():
    assert describe_difference("abcdef", []) == (
        "did not collect 6 of rank 0's 6 tests:\n    a\n    b\n    c\n    d\n    ... and 2 more"
    )
