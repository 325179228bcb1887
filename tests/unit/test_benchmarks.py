"""Benchmarks that need no ranks run to their end, and two recordings are compared truly."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("explain.py", ["--layers", "4"], "2 layers more"),
        ("fold_compare.py", ["--events", "1000"], "compare"),
        ("merge_ranks.py", ["--ranks", "512", "--layers", "8"], "all different"),
    ],
)
def test_a_benchmark_prints_its_figures(script, arguments, line):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert line in done.stdout


def test_what_differs_between_two_recordings_is_told(capsys):
    found = importlib.util.spec_from_file_location("compared", BENCHMARKS / "compare_events.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    gather = {"index": 0, "kind": "all_gather", "nbytes_sent": 8, "role": "parameters"}
    reduce = {"index": 1, "kind": "all_reduce", "nbytes_sent": 4, "role": None}
    old = {"collectives": [gather, reduce], "peak_gathered_nbytes": 16}
    new = copy.deepcopy(old)

    def report(block):
        blocks = {"tests/a.py::b": {("1", 0): block}, "tests/a.py::c": {("0", 2): old}}
        status = module._report({**blocks, "tests/a.py::b": {("1", 0): old}}, blocks, most=5)
        return status, " ".join(capsys.readouterr().out.split())

    assert report(new) == (0, "equal different only old only new tests/a.py 2 0 0 0 all 2 0 0 0")
    new["collectives"][0] |= {"role": "state", "new": 1}
    new["peak_gathered_nbytes"] = 8
    status, said = report(new)
    assert status == 1
    assert said.endswith(
        "tests/a.py 1 1 0 0 all 1 1 0 0 "
        "collectives.role: 1 1 x 'parameters' -> 'state' "
        "first: tests/a.py::b, rank 1, block 0, collectives 0 "
        "collectives.new: 1 1 x '(no such field)' -> 1 "
        "first: tests/a.py::b, rank 1, block 0, collectives 0 "
        "peak_gathered_nbytes: 1 1 x 16 -> 8 first: tests/a.py::b, rank 1, block 0"
    )
    status, said = report({**old, "collectives": [{**reduce, "index": 0}]})
    assert status == 1
    assert "collectives, missing: 1 1 x kind all_gather, nbytes_sent 8, role parameters" in said
    assert "collectives.index: 1 1 x 1 -> 0" in said
    assert module._report({"tests/a.py::b": {("0", 0): old}}, {}, most=5) == 1
    assert "blocks, only old: 1\n  1 x tests/a.py::b" in capsys.readouterr().out
