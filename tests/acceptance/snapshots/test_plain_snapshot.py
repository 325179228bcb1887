"""syrupy's plain ``snapshot`` refuses recordings and trees, whose repr it would write."""

import pytest

SOURCE = """
import pytest
import torch
import torch.distributed as dist
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.extensions.single_file import SingleFileSnapshotExtension
from torch import nn

@pytest.fixture
def as_json(snapshot):
    return snapshot.use_extension(JSONSnapshotExtension)

@pytest.fixture
def recorded(comm_mode):
    with comm_mode:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(2))
    return comm_mode

class Cases:
    def test_recording(self, recorded, snapshot):
        assert recorded == snapshot

    def test_other_order(self, recorded, snapshot):
        assert snapshot == recorded

    def test_named(self, recorded, snapshot):
        assert recorded == snapshot(name="second")

    def test_in_a_dict(self, recorded, snapshot):
        assert {"c": [recorded]} == snapshot

    def test_matched(self, recorded, snapshot):
        snapshot.assert_match(recorded)

    def test_with_a_matcher(self, recorded, snapshot):
        assert [recorded] == snapshot(matcher=lambda *, data, path: data)

    def test_as_json(self, recorded, as_json):
        assert {"c": recorded} == as_json

    def test_as_bytes(self, recorded, snapshot):
        assert recorded == snapshot(extension_class=SingleFileSnapshotExtension)

    def test_compared_with_diff(self, recorded, snapshot):
        assert "one" == snapshot
        assert recorded == snapshot(diff=0)

    def test_negated(self, recorded, snapshot):
        assert recorded != snapshot

    def test_tree(self, fsdp_tree, snapshot):
        assert fsdp_tree(nn.Linear(2, 2)) == snapshot

    def test_tree_in_a_dict(self, fsdp_tree, as_json):
        assert as_json == {"tree": fsdp_tree(nn.Linear(2, 2))}

    def test_fixture_of_trees(self, fsdp_tree, snapshot):
        assert fsdp_tree == snapshot

class TestPlain(Cases):
    pass

@pytest.mark.distributed(world_size=2, backend="fake")
class TestOnRanks(Cases):
    pass
"""
COUNT = SOURCE.count("def test_")
ERROR = (
    "FsdpCommError: syrupy's `snapshot` does not know which parts of {0} to compare, so nothing "
    "was compared or written; use the fixture comm_snapshot: assert {0} == comm_snapshot\n"
)
RECORDING, TREE = map(ERROR.format, ("comm_mode", "fsdp_tree(model)"))


def stored(pytester):
    return {
        path.relative_to(pytester.path): path.read_text()
        for path in pytester.path.rglob("__snapshots__/**/*")
        if path.is_file()
    }


@pytest.mark.parametrize("update", [pytest.param(False, marks=pytest.mark.release), True])
def test_recordings_and_trees_are_refused_by_name(pytester, update):
    pytester.makepyfile(test_it=SOURCE)
    result = pytester.runpytest_subprocess(*["--snapshot-update"][:update])
    result.assert_outcomes(failed=2 * COUNT)
    output = result.stdout.str()
    # Without an update, what `diff` refers to is missing, which comes first.
    assert output.count(RECORDING) == 2 * (COUNT - 3 - (not update))
    assert output.count(TREE) == 2 * 3
    # Other values are written as usual.
    assert all("CommMode" not in text and "Tree" not in text for text in stored(pytester).values())
    assert bool(stored(pytester)) == update


KEPT = """
import pytest
import torch

def test_plain(comm_mode, snapshot):
    with comm_mode:
        pass
    assert {} == snapshot
    assert "after it" == snapshot

@pytest.mark.distributed(world_size=2, backend="fake")
def test_on_ranks(comm_mode, snapshot):
    with comm_mode:
        torch.distributed.all_reduce(torch.ones(2))
    assert {} == snapshot
    assert "after it" == snapshot
"""


def test_what_was_stored_stays_though_it_is_updated(pytester):
    pytester.makepyfile(test_it=KEPT.format("3", "4"))
    pytester.runpytest_subprocess("--snapshot-update").assert_outcomes(passed=2)
    before = stored(pytester)
    assert before
    pytester.makepyfile(test_it=KEPT.format("comm_mode", "comm_mode"))
    for arguments in ([], ["--snapshot-update"], ["--snapshot-update", "-n2"]):
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        result.assert_outcomes(failed=2)
        assert result.stdout.str().count(RECORDING) == 2
        assert stored(pytester) == before


def test_plain_snapshot_accepts_texts_and_answers(pytester):
    pytester.makepyfile(
        test_it="""
        import torch

        def test_it(comm_mode, fsdp_tree, snapshot):
            with comm_mode:
                pass
            tree = fsdp_tree(torch.nn.Linear(2, 2))
            assert repr(comm_mode) == snapshot
            assert {"calls": comm_mode.counts(), "text": str(tree)} == snapshot
            assert comm_mode.events == snapshot
            print(comm_mode, tree)
        """
    )
    for arguments in (["--snapshot-update"], []):
        pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)
