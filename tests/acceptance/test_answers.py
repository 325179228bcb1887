"""The text of failed assertions about `comm_mode.counts` and `nbytes`."""

import pytest

PROJECT = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def sharded(mesh, layers=3):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture
def stepped(device_mesh, comm_mode):
    model = sharded(device_mesh())
    with comm_mode(model):
        model(torch.ones(1, 16)).sum().backward()
    return comm_mode


@pytest.mark.distributed(world_size=2, scope="module")
class TestStep:
    @pytest.mark.parametrize("expected", [3, 9])
    def test_counts(self, stepped, expected):
        assert stepped.counts("all_gather", phase="forward") == expected

    def test_nothing(self, comm_mode, stepped):
        assert 1 <= comm_mode.counts("broadcast") < 4

    def test_nbytes_of_a_pattern(self, stepped):
        assert stepped.nbytes("all_gather", owner="{0..1}") in (1, 2)

    def test_truth(self, comm_mode, stepped):
        assert not comm_mode.counts("reduce_scatter")

    def test_sum(self, stepped):
        assert stepped.counts("all_gather") + 1 == 2

    def test_typo(self, stepped):
        assert stepped.counts("all_gather", owner="layers.0") == 0

    def test_ranks_differ(self, stepped, dist_info):
        assert stepped.counts("all_gather", phase="forward") == 3 + dist_info.rank
"""
SHOWN = """
>       assert stepped.counts("all_gather", phase="forward") == expected
E       AssertionError: assert 3 == 9, where 3 is counts('all_gather', phase='forward')
E         forward {0..2} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
*
E       AssertionError: assert 1 <= 0, where 0 is counts('broadcast')
E         nothing matches; the recording has:
E         forward {0..2} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
E         backward {0..2} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
E         backward {0..2} reduce_scatter[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
*
E       AssertionError: assert 4352 in (1, 2), where 4352 is nbytes('all_gather', owner='{0..1}')
E         forward {0..1} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
E         backward {0..1} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
*
E       AssertionError: assert not 3
E        +  where 3 = counts('reduce_scatter')
E        +    where counts = <CommMode: 9 collectives, 9.6 KiB>*
*
E       AssertionError: assert (6 + 1) == 2
*
>       assert stepped.counts("all_gather", owner="layers.0") == 0
E       *RecordingError: there is no module 'layers.0' in the model passed to comm_mode; *
*
E       AssertionError: assert 3 == 4, where 3 is counts('all_gather', phase='forward')
E         forward {0..2} all_gather[[]dp] x1 of 1_088 B at tests/sub/test_model.py:19
*
rank 1 failed
*
FAILED tests/sub/test_model.py::TestStep::test_counts[[]9] - AssertionError: as...
*
"""


def test_a_failed_assertion_shows_what_was_counted(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    directory = pytester.mkdir("tests") / "sub"
    directory.mkdir()
    (directory / "test_model.py").write_text(PROJECT)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=7)
    lines = SHOWN.strip().splitlines()
    result.stdout.fnmatch_lines(lines)
    # Neither the complete recording nor the plugin's code is printed.
    for never in ("*# pytest-fsdp-comm*", "*Full output truncated*", "*questions.py*"):
        result.stdout.no_fnmatch_line(never)
    result = pytester.runpytest_subprocess("-n", "2", "-k", "counts")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(lines[1:3])


@pytest.mark.cold
def test_other_assertions_unchanged_without_imports(pytester):
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            ours = ("comm.questions", "reports.assertions")
            rooms = ("torch", *(f"pytest_fsdp_comm.{room}" for room in ours))
            print("loaded:", [name for name in rooms if name in sys.modules])
        """
    )
    pytester.makepyfile("def test_numbers():\n    assert 1 == 2\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E       assert 1 == 2", "loaded: []"])
