"""Benchmarks that need no ranks run to their end."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("divergence.py", ["--layers", "2", "--turns", "2"], "64 recordings, 2 stages"),
        ("explain.py", ["--layers", "4"], "2 layers more"),
        ("fold_compare.py", ["--events", "1000"], "compare"),
        pytest.param(
            *("merge_ranks.py", ["--ranks", "512", "--layers", "8"], "all ranks different"),
            marks=pytest.mark.release,
        ),
    ],
)
def test_benchmark_prints_its_figures(script, arguments, line):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert line in done.stdout
