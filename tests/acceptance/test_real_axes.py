"""Simulated ranks of pipelines and experts record the same events as gloo ranks."""

import json
import pathlib
import shutil

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.release
def test_real_axis_ranks_record_same_as_gloo(pytester):
    for name in ("oracle.py", "models.py", "texts.py", "torch_facts.py", "conftest.py"):
        shutil.copy(TESTS / name, pytester.path)
    shutil.copy(TESTS / "real_axes.py", pytester.path / "test_real_axes.py")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=extend_under_load(300))
    result.assert_outcomes(passed=8)
    recorded = {path.stem: json.loads(path.read_text()) for path in pytester.path.glob("*.json")}
    simulated = {name: steps for name, steps in recorded.items() if "simulated" in name}
    ranks = sorted(int(name.rpartition("-")[2]) for name in simulated)
    assert ranks == sorted([0, 1, *[0, 2, 4, 6] * 3])
    for name, steps in simulated.items():
        assert all(steps), name
        assert steps == recorded[name.replace("simulated", "gloo")], name
