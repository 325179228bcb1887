"""Random models and plans: gloo ranks, the fake group, simulated ranks and witnesses agree."""

import json
import pathlib
import shutil

from pytest_fsdp_comm.ranks.wire.load import under_load

TESTS = pathlib.Path(__file__).parents[1]


def test_random_plans_record_same_on_all_rank_types(pytester):
    for name in ("oracle.py", "models.py", "texts.py", "torch_facts.py", "conftest.py"):
        shutil.copy(TESTS / name, pytester.path)
    shutil.copy(TESTS / "random_plans.py", pytester.path / "test_random_plans.py")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=under_load(3000))
    result.assert_outcomes(passed=9)
    for world_size, at_least in ((2, 12), (4, 12), (8, 3)):
        recorded = {
            path.name: json.loads(path.read_text())
            for path in pytester.path.glob(f"*-{world_size}-*.json")
        }
        # The fake group ran its first rank only.
        assert len(recorded) == 2 * world_size + 1
        fake = recorded[f"fake-{world_size}-0.json"]
        assert len(fake) >= at_least
        assert all(example["events"] and example["tree"] for example in fake)
        for name, examples in recorded.items():
            assert examples == fake, name
