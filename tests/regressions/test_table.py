"""Record, write, read and compare each change of the table.

``python tests/regressions/regenerate.py`` rewrites the expected first lines.

``FSDP_COMM_TABLE=DIR pytest tests/regressions/test_table.py`` also writes both sides of each case
to ``DIR/<case>``: the snapshots of communication (``old.comm``, ``new.comm``) and of trees
(``old.tree.comm``, ``new.tree.comm``), the recording of the changed side (``new.json``), the
attributes of the case (``case.json``) and the first lines of its failures (``first_lines.json``).
"""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from regressions.cases import TABLE
from regressions.expected import EXPECTED
from regressions.table import both_sides, record, told, write

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.json import dump_recordings
from pytest_fsdp_comm.snapshots.documents import SnapshotText, differs

DIRECTORY = os.environ.get("FSDP_COMM_TABLE")
CASES = TABLE.cases

# Torch warns about some of these cases.
pytestmark = pytest.mark.filterwarnings("ignore")


def leave(case, texts, recording):
    folder = Path(DIRECTORY) / case.name
    write(folder, texts)
    (folder / "new.json").write_text(dump_recordings([recording]), encoding="utf-8")
    known = {name: getattr(case, name) for name in case.__slots__ if name != "build"}
    (folder / "case.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def check(comm_mode, name):
    case = CASES[name]
    old, new = (record(case, comm_mode, changed=changed) for changed in (False, True))
    texts = both_sides(old, new)
    if DIRECTORY and dist.get_rank() == 0:
        leave(case, texts, new.recording)
    assert bool(compare(old.comm, new.comm).changes) != case.is_silent
    old_text, new_text = (
        SnapshotText(texts[name], where=name) for name in ("old.comm", "new.comm")
    )
    assert differs(old_text, new_text) != case.is_silent
    assert compare(new.comm, new.comm).changes == ()
    lines = {
        title: told(compare(before, after))[0]
        for title, before, after in directions(case, old.comm, new.comm)
    }
    if DIRECTORY and dist.get_rank() == 0:
        text = json.dumps(lines, ensure_ascii=False)
        (Path(DIRECTORY) / case.name / "first_lines.json").write_text(text, encoding="utf-8")
    assert all(lines.values())
    assert lines == {title: EXPECTED.get(title, line) for title, line in lines.items()}


def directions(case, old, new):
    """Yield the change and, if it is also a case, its reverse, each with a title."""
    if not case.is_silent:
        yield case.name, old, new
    if case.is_reversible:
        yield f"{case.name}, back", new, old


def select(**wanted):
    names = [
        case.name
        for case in CASES.values()
        if all(getattr(case, name) == value for name, value in ({"gloo": 0} | wanted).items())
    ]
    return pytest.mark.parametrize("name", names)


@pytest.mark.distributed(world_size=4, backend="fake", scope="module")
@select(worlds=(4, 4))
def test_a_change_is_a_difference(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=8, backend="fake", scope="module")
@select(worlds=(8, 8))
def test_a_change_of_8_ranks_is_a_difference(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=4, backend="fake")
@select(worlds=(4, 8))
def test_a_change_to_8_ranks_is_a_difference(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=2, scope="module")
@select(gloo=2)
def test_a_change_between_2_ranks_is_a_difference(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=4, scope="module")
@select(gloo=4)
def test_a_change_between_4_ranks_is_a_difference(comm_mode, name):
    check(comm_mode, name)


def test_each_change_has_an_expected_first_line():
    titles = [title for case in CASES.values() for title, *_ in directions(case, None, None)]
    assert EXPECTED.keys() <= set(titles)
    missing = [title for title in titles if title not in EXPECTED]
    if missing:
        pytest.skip(f"{len(missing)} first lines are not written yet: {'; '.join(missing)}")


def test_the_table_has_enough_of_both_kinds():
    regressions = [case for case in CASES.values() if case.is_regression]
    assert len(regressions) >= 40
    assert len(CASES) - len(regressions) >= 40
