"""Random models and plans: gloo ranks, the fake group, simulated ranks and witnesses agree."""

import json
import pathlib
import shutil

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.release
@pytest.mark.parametrize(
    ("number", "world_size", "at_least"),
    [
        ("two", 2, 12),
        ("four", 4, 6),
        ("eight", 8, 3),
    ],
)
def test_random_plans_record_same_on_all_rank_types(pytester, number, world_size, at_least):
    for name in ("oracle.py", "models.py", "texts.py", "torch_facts.py", "conftest.py"):
        shutil.copy(TESTS / name, pytester.path)
    shutil.copy(TESTS / "random_plans.py", pytester.path / "test_random_plans.py")
    arguments = ("-p", "no:cacheprovider", "-k", f"test_{number}_")
    result = pytester.runpytest_subprocess(*arguments, timeout=extend_under_load(3000))
    result.assert_outcomes(passed=3, deselected=6)
    recorded = {path.name: json.loads(path.read_text()) for path in pytester.path.glob("*.json")}
    # The fake group ran its first rank only.
    assert len(recorded) == 2 * world_size + 1
    fake = recorded[f"fake-{world_size}-0.json"]
    assert len(fake) >= at_least
    assert all(example["events"] and example["tree"] for example in fake)
    for name, examples in recorded.items():
        assert examples == fake, name
