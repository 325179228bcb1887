"""What ``fsdp-comm audit`` finds, and what it leaves alone."""

import json
from pathlib import Path

import pytest
import sample_profiles

from pytest_fsdp_comm.snapshots.audit import Collection, find_faults
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.unused import CollectedModule, CollectedTest
from pytest_fsdp_comm.text.codec import from_json, to_json

TEXT = format_profile(sample_profiles.profile())
OLD = "# pytest-fsdp-comm 1 comm\nend\n"
MODULE = """
import pytest

@pytest.mark.distributed(world_size=2)
def test_fixed(comm_snapshot): ...

@pytest.mark.distributed
def test_open(comm_snapshot): ...
"""


def module(*tests, is_whole=True):
    return CollectedModule(
        path=Path("test.py"),
        stamp=(),
        tests=tuple(CollectedTest(name=name, variant=ws, nodeid=name) for _, name, ws in tests),
        is_whole=is_whole,
        doubts={},
    )


def collection(project, *tests, unknown=(), is_full=True):
    places = sorted({place for place, _, _ in tests})
    modules = {place: module(*(test for test in tests if test[0] == place)) for place in places}
    return Collection(
        snapshot_dir=project / "snapshots",
        anchor=project,
        modules=modules | {place: module(is_whole=False) for place in unknown},
        is_full=is_full,
    )


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("test_a/test_x.ws2.comm", TEXT, None),
        ("test_a/test_x.ws2.tree.comm", TEXT, None),
        ("test_a/test_x.ws4.comm", TEXT, ("variant", "its test is collected with ws2 only")),
        ("test_a/test_y.ws4.comm", TEXT, None),
        ("test_a/test_z.ws2.comm", TEXT, ("orphan", "no such test is collected")),
        ("test_a/odd.comm", TEXT, ("orphan", "its name is not that of a snapshot")),
        ("test_b/test_x.ws2.comm", TEXT, ("orphan", "nothing of test_b.py is collected")),
        ("test_c/test_x.ws2.comm", TEXT, ("orphan", "test_c.py does not exist")),
        ("test_gpu/test_x.ws2.comm", TEXT, None),
        ("test_a/test_x.ws2.comm", TEXT[:-4], ("broken", "line ")),
        ("test_a/test_x.ws2.comm", OLD, ("old format", "line 1: the snapshot has format 1")),
        ("test_a/test_x.ws2.txt", "", None),
    ],
)  # fmt: skip
def test_each_fault_has_a_file_beside_it_that_has_none(project, write, file, content, found):
    write("test_b.py", "")
    write(f"snapshots/{file}", content)
    known = collection(
        project,
        ("test_a", "test_x", "ws2"),
        # Deselected: at which world sizes it runs is not known.
        ("test_a", "test_y", ""),
        unknown=("test_gpu",),
    )
    known = from_json(Collection, json.loads(json.dumps(to_json(known))))
    faults = [(one.fault, one.what) for one in find_faults([known])]
    if found is None:
        assert faults == []
    else:
        assert [fault for fault, _ in faults] == [found[0]]
        assert faults[0][1].startswith(found[1])


def test_a_selection_says_nothing_of_what_it_left_out(project, write):
    write("test_b.py", "")
    write("snapshots/test_a/test_z.ws2.comm", TEXT)
    write("snapshots/test_b/test_x.ws2.comm", TEXT)
    write("snapshots/test_c/test_x.ws2.comm", TEXT)
    known = collection(project, ("test_a", "test_x", "ws2"), is_full=False)
    assert [one.what for one in find_faults([known])] == ["test_c.py does not exist"]


def test_several_world_sizes_are_looked_at_together(project, write):
    for size in (2, 4, 8):
        write(f"snapshots/test_a/test_x.ws{size}.comm", TEXT)
    known = [collection(project, ("test_a", "test_x", f"ws{size}")) for size in (2, 4)]
    assert [one.what for one in find_faults(known)] == ["its test is collected with ws2, ws4 only"]


def test_a_file_that_a_link_gives_another_name_has_the_tests_of_both(project, write):
    write("snapshots/test_a/test_x.ws2.comm", TEXT)
    write("snapshots/test_a/test_y.ws2.comm", TEXT)
    write("snapshots/test_a/test_z.ws2.comm", TEXT)
    write("snapshots/test_c/test_w.ws2.comm", TEXT)
    (project / "snapshots/test_b").symlink_to("test_a")
    (project / "snapshots/test_c/test_z.ws2.comm").symlink_to("../test_a/test_z.ws2.comm")
    tests = [("test_a", "test_x"), ("test_b", "test_y"), ("test_c", "test_z"), ("test_c", "test_w")]
    every = [collection(project, *((*test, "ws2") for test in tests))]
    assert find_faults(every) == []
    some = [collection(project, *((*test, "ws2") for test in tests[:1] + tests[3:]))]
    assert [str(one.path.relative_to(project / "snapshots")) for one in find_faults(some)] == [
        "test_a/test_y.ws2.comm",
        "test_a/test_z.ws2.comm",
        "test_c/test_z.ws2.comm",
    ]


@pytest.mark.costly
def test_audit_collects_via_pytest(write, fsdp_comm):
    write("tests/test_a.py", MODULE)
    write(
        "tests/test_skipped.py", "import pytest\npytest.skip('no GPU', allow_module_level=True)\n"
    )
    write("snapshots/tests/test_a/test_fixed.ws2.comm", TEXT)
    write("snapshots/tests/test_a/test_open.ws2.comm", TEXT)
    write("snapshots/tests/test_a/test_open.ws4.comm", TEXT)
    write("snapshots/tests/test_skipped/test_x.ws4.comm", TEXT)
    done = fsdp_comm("audit", "--", "-p", "no:hypothesispytest")
    assert done.status == 1
    assert done.err.startswith(
        "$ python -m pytest --collect-only -q -p pytest_fsdp_comm.snapshots."
    )
    assert done.lines == [
        "snapshots/tests/test_a/test_open.ws4.comm: variant: its test is collected with ws2 only",
        "4 snapshot files in snapshots, 2 tests: 1 variant",
        "If tests also run with other --world-size values, name them: "
        "fsdp-comm audit --world-size 2 --world-size 4",
    ]
    done = fsdp_comm("audit", "--world-size", "2", "--world-size", "4", "--", "-p", "no:randomly")
    assert done.status == 0
    assert done.lines == ["4 snapshot files in snapshots, 2 tests: no faults"]
    write("tests/test_a.py", "import nothing_of_this_name\n")
    done = fsdp_comm("audit", "tests")
    assert (done.status, done.out) == (2, "")
    assert "pytest cannot collect the tests" in done.err
    assert "nothing_of_this_name" in done.err
    assert not list(Path("snapshots").rglob("*.json"))


@pytest.mark.costly
def test_snapshots_of_plain_syrupy_do_not_stop_the_audit(write, fsdp_comm):
    write("test_a.py", f"{MODULE}\ndef test_plain(snapshot): assert [1] == snapshot\n")
    write(
        "__snapshots__/test_a.ambr",
        "# serializer version: 1\n# name: test_plain\n  list([\n    1,\n  ])\n# ---\n",
    )
    write("snapshots/test_a/test_fixed.ws2.comm", TEXT)
    done = fsdp_comm("audit", "--", "-p", "no:randomly")
    assert (done.status, done.lines) == (
        0,
        ["1 snapshot file in snapshots, 3 tests: no faults"],
    ), done.err
