"""``--comm-scaling``: sessions of users, whose numbers are those of formulas written here."""

import json
import math
import re
from pathlib import Path

import pytest
from page_checks import check_page

from pytest_fsdp_comm.text.nbytes import show_nbytes

WIDTH, LAYERS = 100, 3
TESTS = """
import os
import pytest, torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=4096, simulate=256, ranks=[0, 4095])
@pytest.mark.parametrize("bias", [False, True])
def test_layers(bias, device_mesh, comm_mode, fsdp_tree, comm_snapshot, dist_info):
    mesh = device_mesh()
    model = nn.Sequential(*(nn.Linear(100, 100, bias=bias) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        for _ in range(dist_info.world_size // 64 if "GROWS" in os.environ else 1):
            model(torch.ones(2, 100)).sum().backward()
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot
    assert bias or dist_info.world_size != 128, "too few"

@pytest.mark.distributed(world_size=2)
def test_real(comm_mode, dist_info):
    assert dist_info.world_size == 2

def test_of_others():
    pass
"""
SIZES = (64, 128, 512)


def expected(ranks, bias):
    """Calls, bytes, padding and peak of a step: each layer is a unit, and never kept."""
    numel = WIDTH * WIDTH + WIDTH * bias
    padded = math.ceil(WIDTH / ranks) * ranks * (WIDTH + bias)
    # Forward and backward gather each layer, and backward reduces it.
    calls = 3 * LAYERS
    return [
        str(calls),
        show_nbytes(calls * padded * 4),
        show_nbytes(calls * (padded - numel) * 4),
        # Backward gathers a layer while the next one is in use.
        show_nbytes(2 * numel * 4),
    ]


def run(pytester, *arguments):
    sizes = ",".join(map(str, SIZES))
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", f"--comm-scaling={sizes}")
    result = pytester.runpytest_subprocess(*options, *arguments)
    return result, result.stdout.str()


def rows(out, test):
    """The cells of each size in a test's table, and the lines below it."""
    found, told = {}, []
    lines = iter(out.partition(f"\n{test}\n")[2].splitlines()[1:])
    for line in lines:
        if not line.startswith("  "):
            break
        cells = re.split(r"  +", line.strip())
        if cells[0].isdigit():
            found[int(cells[0])] = cells[1:]
        else:
            told.append(line.strip())
    return found, told


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_every_size_is_recorded_and_its_growth_told(pytester, workers):
    pytester.makepyfile(test_it=TESTS)
    junit = ("--junitxml=junit.xml", "--comm-report=report")
    result, out = run(pytester, *workers, *junit)
    result.assert_outcomes(passed=7, failed=1)
    for bias in (False, True):
        found, told = rows(out, f"test_it.py::test_layers[{bias}]")
        assert found.keys() == {*SIZES}
        for ranks, (*cells, outcome) in found.items():
            assert cells == expected(ranks, bias)
            has_failed = ranks == 128 and not bias
            assert outcome == ("failed: AssertionError: too few" if has_failed else "none")
        # 128 rows for 100, and then 512.
        paddings = [expected(ranks, bias)[2] for ranks in (64, 512)]
        assert told == [
            f"grows: padding {' -> '.join(paddings)} (x{412 / 28:.1f}) from 64 to 512 ranks"
        ]
    assert out.count("fsdp-comm: without simulate=, 1 distributed test ran as always") == 1
    assert (pytester.path / "junit.xml").read_text().count("<testcase") == 8
    assert not (pytester.path / "snapshots").exists()
    page = (pytester.path / "report" / "tests" / "scaling.html").read_text()
    check_page(page)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    (first, *_), _ = json.loads(data)["scalings"]
    assert (first[0], first[2]["calls"]) == (64, 3 * LAYERS)
    assert 'href="tests/scaling.html"' in (pytester.path / "report" / "index.html").read_text()


def test_sizes_are_compared_with_the_snapshots_that_they_have(pytester, monkeypatch):
    pytester.makepyfile(test_it=TESTS)
    result, out = run(pytester, "--snapshot-update", "-k", "True")
    result.assert_outcomes(passed=3, deselected=5)
    assert {outcome for *_, outcome in rows(out, "test_it.py::test_layers[True]")[0].values()} == {
        "written"
    }
    files = sorted(path.name for path in (pytester.path / "snapshots").rglob("*.ws*.comm"))
    assert len(files) == 2 * len(SIZES)
    (pytester.path / "snapshots" / "test_it" / "test_layers[True].ws64.comm").unlink()
    monkeypatch.setenv("GROWS", "1")
    result, out = run(pytester, "-k", "True")
    result.assert_outcomes(passed=1, failed=2, deselected=5)
    found, told = rows(out, "test_it.py::test_layers[True]")
    assert {ranks: cells[-1] for ranks, cells in found.items()} == {
        64: "none",
        128: "differs",
        512: "differs",
    }
    assert "grows: calls of all_gather[dp] 6 -> 48 (x8.0) from 64 to 512 ranks" in told
    # A session at the test's own size knows that these belong to it.
    monkeypatch.delenv("GROWS")
    plain = pytester.runpytest_subprocess("--snapshot-update", "-p", "no:randomly")
    plain.assert_outcomes(passed=4)
    kept = {path.name for path in (pytester.path / "snapshots").rglob("*.comm")}
    assert {*files} - {"test_layers[True].ws64.comm"} <= kept


def test_sizes_that_did_not_run_are_told(pytester):
    pytester.makepyfile(test_it=TESTS)
    result, out = run(pytester, "-x", "-k", "False")
    result.assert_outcomes(passed=1, failed=1, deselected=5)
    found, told = rows(out, "test_it.py::test_layers[False]")
    assert found[512] == ["not run"]
    assert found[64][:-1] == expected(64, bias=False)
    # 100 rows are 128 over 64 ranks, and over 128.
    assert told == ["nothing grows that should be flat"]


def test_a_test_that_lists_simulated_sizes_is_drawn_in_every_report(pytester):
    source = TESTS.replace("world_size=4096, simulate=256", "world_size=[8, 64], simulate=True")
    pytester.makepyfile(test_it=source.replace("[0, 4095]", "[0]"))
    options = ("-p", "no:randomly", "--comm-report=report", "--snapshot-update")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=6)
    page = (pytester.path / "report" / "tests" / "scaling.html").read_text()
    assert "test_it.py::test_layers[True]" in page
    assert "test_real" not in page


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"
LAYOUT = """
import pytest, torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=8192, simulate=True)
def test_layout(device_mesh, comm_mode):
    mesh = device_mesh()
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        model(torch.ones(2, 1000)).sum().backward()
"""


def test_the_page_shows_a_real_table(pytester):
    pytester.makepyfile(test_layout=LAYOUT)
    pytester.makeini("[pytest]\nfsdp_comm_links = *: 50 GB/s 10 us\n")
    (command,) = re.findall(r"^\$ pytest (--comm-scaling .*)$", PAGE.read_text(), re.MULTILINE)
    (table,) = re.findall(r"(?ms)^```text no-run\n(.*?)^```$", PAGE.read_text())
    result = pytester.runpytest_subprocess(*command.split())
    result.assert_outcomes(passed=5)
    assert table in result.stdout.str()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("8", "--comm-scaling: expected at least two world sizes such as 8,64,512, got '8'"),
        ("8,8", "--comm-scaling: expected at least two world sizes such as 8,64,512, got '8,8'"),
        ("8,many", "--comm-scaling: expected a whole number of ranks from 1 to 256"),
    ],
)
def test_sizes_that_cannot_be_are_refused(pytester, given, told):
    result = pytester.runpytest_subprocess(f"--comm-scaling={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert told in result.stderr.str()
