"""Changes with similar rows are not reported with each other's causes.

For each cause of docs/causes.md, `look_alikes.json` has a pattern for its text, a change that it is
``named for``, and similar changes that it is ``not named for``, each with the cause that is printed
instead, or an empty string for any other result. The name of a change may be followed by ``back``
(the reverse change), ``trees`` (trees are compared too) and ``versions`` (recorded with torch 2.13,
then 2.15). A cause that a change is ``not named for`` must not appear with trees either.

``FSDP_COMM_TABLE=DIR pytest tests/regressions/test_look_alikes.py`` writes both sides of each
change to ``DIR/<case>``.
"""

import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from regressions.cases import TABLE
from regressions.look_alikes import OWN
from regressions.table import both_sides, record, write

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.snapshots.differences import evidence_of
from pytest_fsdp_comm.tree import diff as tree_diff

DIRECTORY = os.environ.get("FSDP_COMM_TABLE")
CASES = TABLE.cases | OWN
CAUSES = json.loads(Path(__file__).with_name("look_alikes.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "causes.md"

# Torch warns about some of these cases.
pytestmark = pytest.mark.filterwarnings("ignore")


def expectations():
    """Return patterns by case: ``(how, has trees, pattern, whether a cause must match)``."""
    patterns = defaultdict(set)
    for cause in CAUSES.values():
        for change, instead in {cause["named for"]: None, **cause["not named for"]}.items():
            case, *how = change.split(", ")
            has_trees = "trees" in how
            if instead is None:
                patterns[case].add((*how, has_trees, cause["text"], True))
                continue
            if instead:
                patterns[case].add((*how, has_trees, re.escape(instead), True))
            for compared in {has_trees, True}:
                patterns[case].add((*how, compared, cause["text"], False))
    return patterns


EXPECTED = expectations()


def causes(old, new, *, has_trees, versions):
    """Return all likely causes, one per line."""
    sides = [
        replace(side.comm, torch_version=version) if versions else side.comm
        for side, version in ((old, "2.13.0"), (new, "2.15.0"))
    ]
    evidence = evidence_of([(old.tree, new.tree)]) if has_trees else None
    texts = [cause.text for cause in compare(*sides, evidence).causes]
    if has_trees:
        texts += [change.likely for change in tree_diff.compare(old.tree, new.tree)]
    return "\n".join(dict.fromkeys(filter(None, texts)))


def check(comm_mode, name):
    case = CASES[name]
    old, new = (record(case, comm_mode, changed=changed) for changed in (False, True))
    if DIRECTORY:
        write(Path(DIRECTORY) / name, both_sides(old, new))
    wrong = []
    for *how, has_trees, text, is_named in EXPECTED[name]:
        sides = (new, old) if "back" in how else (old, new)
        texts = causes(*sides, has_trees=has_trees, versions="versions" in how)
        if bool(re.search(text, texts, re.MULTILINE)) != is_named:
            wrong.append({"how": how, "trees": has_trees, text: is_named, "causes": texts})
    assert wrong == []


def select(size, *, gloo=0):
    names = sorted(
        name for name in EXPECTED if (CASES[name].worlds[0], CASES[name].gloo) == (size, gloo)
    )
    return pytest.mark.parametrize("name", names)


@pytest.mark.distributed(world_size=4, backend="fake", scope="module")
@select(4)
def test_cause_of_a_look_alike_is_not_named(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=8, backend="fake", scope="module")
@select(8)
def test_cause_of_8_ranks_is_not_named(comm_mode, name):
    check(comm_mode, name)


@pytest.mark.distributed(world_size=2, scope="module")
@select(4, gloo=2)
def test_cause_of_2_real_ranks_is_not_named(comm_mode, name):
    check(comm_mode, name)


def test_causes_of_the_page_have_3_look_alikes():
    table = PAGE.read_text().partition("## Causes")[2]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == [*CAUSES], "docs/causes.md and look_alikes.json list the same causes"
    counts = {name: len(cause["not named for"]) for name, cause in CAUSES.items()}
    assert {name: count for name, count in counts.items() if count < 3} == {}


def test_look_alikes_are_recorded():
    assert OWN.keys() <= EXPECTED.keys() <= CASES.keys()
    kinds = {(CASES[name].worlds, CASES[name].gloo) for name in EXPECTED}
    assert kinds == {((4, 4), 0), ((8, 8), 0), ((4, 4), 2)}
