"""Names of snapshot files: readable, unique, and converted back to tests."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.snapshots.names import (
    PART,
    directory_to_module,
    escape_test_name,
    make_basename,
    module_to_directory,
    read_basename,
)


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
def test_each_snapshot_has_a_readable_file_name(test, index, name):
    assert make_basename(test, "ws4", index) == name


@given(
    st.lists(
        st.tuples(
            st.text(max_size=12), st.one_of(st.integers(0, 3), st.text(min_size=1, max_size=6))
        ),
        unique=True,
    )
)
def test_no_two_share_a_file(pairs):
    named = {make_basename(f"test_it[{params}]", "ws4", index) for params, index in pairs}
    # An assertion that is named like another's number is the same file, as in syrupy.
    distinct = {(params, str(index) if index != 0 else "") for params, index in pairs}
    assert len(named) == len(distinct)


def test_long_names_are_cut_and_stay_apart():
    names = {make_basename(f"test_step[{'x' * 500}{end}]", "ws4", "y" * 300 + end) for end in "abc"}
    assert len(names) == 3
    assert all(len(name) <= 220 for name in names)
    assert len({read_basename(name) for name in names}) == 3
    assert {read_basename(name)[1] for name in names} == {"ws4"}


@given(st.text(max_size=200), st.one_of(st.integers(0, 3), st.text(min_size=1, max_size=80)))
def test_read_basename_returns_test_and_variant(params, index):
    test = f"TestLlama.test_it[{params}]"
    assert read_basename(make_basename(test, "ws4", index)) == (escape_test_name(test), "ws4")


def test_parts_of_an_index_are_separated_by_dots():
    assert make_basename("test_a", "ws4", f"second{PART}tree") == "test_a.ws4.second.tree"
    assert make_basename("test_a", "ws4", "second.tree") == "test_a.ws4.second%2Etree"


def test_a_name_that_is_not_ours_is_left_unread():
    assert read_basename("README") is None
    assert read_basename("test_step") is None
    assert read_basename("test_step.ws") is None
    assert read_basename("test_step.ws4x") is None
    assert read_basename("test_step.ws4.tree") == ("test_step", "ws4")
    assert read_basename("test_step.ws40.tree") == ("test_step", "ws40")


ROOT = Path("/home/me/project")


@pytest.mark.parametrize(
    ("module", "directory"),
    [
        ("/home/me/project/test_a.py", "test_a"),
        ("/home/me/project/tests/sub/test_a.py", "tests/sub/test_a"),
        ("/home/me/project/tests/test.a.py", "tests/test.a"),
        ("/home/me/project/tests/test_a.ipynb", "tests/test_a.ipynb"),
        ("/home/me/other/test_a.py", "%2E%2E/other/test_a"),
        ("/srv/test_a.py", "%2E%2E/%2E%2E/%2E%2E/srv/test_a"),
    ],
)
def test_the_directory_mirrors_the_path_of_the_module(module, directory):
    written = module_to_directory(Path(module), ROOT)
    assert str(written) == directory
    assert directory_to_module(written, ROOT) == Path(module) or not module.endswith(".py")
