"""File names of snapshots: readable, apart, and found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.snapshot_names import basename, is_of_variant, snapshot_name


@pytest.mark.parametrize(
    ("test", "index", "name"),
    [
        ("test_step", 0, "test_step.ws4"),
        ("test_step", 1, "test_step.ws4.1"),
        ("test_step", "tree", "test_step.ws4.tree"),
        ("TestLlama.test_step[tied]", 0, "TestLlama.test_step[tied].ws4"),
        ("test_step[a/b]", 0, "test_step[a%2Fb].ws4"),
        ("test_step[a.ws2]", "x/y", "test_step[a%2Ews2].ws4.x%2Fy"),
        ("test_step[é]", 0, "test_step[%C3%A9].ws4"),
    ],
)
def test_names(test, index, name):
    assert basename(test, "ws4", index) == name


@given(
    st.lists(
        st.tuples(
            st.text(max_size=12), st.one_of(st.integers(0, 3), st.text(min_size=1, max_size=6))
        ),
        unique=True,
    )
)
def test_no_two_share_a_file(pairs):
    named = {basename(f"test_it[{params}]", "ws4", index) for params, index in pairs}
    # An assertion that is named like another's number is the same file, as in syrupy.
    distinct = {(params, str(index) if index != 0 else "") for params, index in pairs}
    assert len(named) == len(distinct)


def test_long_names_are_cut_and_stay_apart():
    names = {basename(f"test_step[{'x' * 500}{end}]", "ws4", "tree") for end in "abc"}
    assert len(names) == 3
    assert all(len(name) <= 250 and name.endswith(".ws4.tree") for name in names)
    assert all(is_of_variant(name, "ws4") for name in names)


def test_variants_are_told_apart():
    assert is_of_variant("test_step.ws4.tree", "ws4")
    assert not is_of_variant("test_step.ws4.tree", "ws40")
    assert not is_of_variant("test_step.ws40", "ws4")
    assert not is_of_variant("README", "ws4")


def test_syrupy_finds_the_test_of_a_file():
    # Up to the first character that no identifier has.
    assert snapshot_name("TestLlama.test_step.ws4.tree") == "TestLlama.test_step[ws4].tree"
    assert snapshot_name("test_step[tied].ws4") == "test_step[tied][ws4]"
