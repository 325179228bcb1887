"""Reports of `benchmarks/run.py` about figures that changed or exceed their limits."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def runner():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec = importlib.util.spec_from_file_location("benchmarks_run", BENCHMARKS / "run.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    sys.modules.pop("figures", None)


TITLE = "Explaining"


@pytest.mark.parametrize(
    ("now", "most", "remark"),
    [
        ([10.0, 10.1, 10.2], None, ""),
        ([10.3, 10.4, 10.5], None, ""),  # within 5 %
        ([9.0, 12.0, 16.0], None, ""),  # within the spans between quartiles
        ([12.0, 12.1, 12.2], None, "**moved**"),
        ([8.0, 8.1, 8.2], None, "**moved**"),
        ([10.0, 10.1, 10.2], 10.0, "**over**"),
        ([10.0, 10.1, 10.2], 10.1, ""),
    ],
)
def test_change_beyond_noise_is_flagged(runner, now, most, remark):
    before = {TITLE: {"a case": runner._figure([10.0, 10.1, 10.2], None)}}
    lines, is_bad = runner._page({TITLE: {"a case": runner._figure(now, most)}}, before)
    (row,) = [line for line in lines if line.startswith("| a case")]
    assert is_bad == bool(remark)
    assert remark in row
    assert row.count("**") == 2 * bool(remark)
    assert "`python benchmarks/explain.py`" in lines


@pytest.mark.parametrize("before", [None, [1.0]])
def test_figure_without_baseline_or_noise_is_silent(runner, before):
    earlier = {TITLE: {"new": runner._figure(before, None)}} if before else {}
    _, is_bad = runner._page({TITLE: {"new": runner._figure([3.0], None)}}, earlier)
    assert not is_bad


def test_figures_are_saved_only_on_request(runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep = sys.modules["figures"].keep
    keep("a case", [1.0])
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv(runner.FILE, str(tmp_path / "kept"))
    keep("a case", [1.0, 2.0], most=3)
    assert (tmp_path / "kept").read_text() == (
        '{"name": "a case", "values": [1.0, 2.0], "most": 3}\n'
    )
