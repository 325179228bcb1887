"""``--comm-report`` in sessions of every kind, and its errors."""

import html
import re

import pytest
import running
from page_checks import check_page

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

TESTS = """
import os
import pytest, torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def train(mesh, comm_mode, *, extra=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh)
    if extra:
        fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        model(torch.ones(2, 8)).sum().backward()
    return model

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("kind", ["same", "</script><b>&'\\N{BUG}"])
def test_step(kind, device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    changes = kind != "same" and "CHANGED" in os.environ
    model = train(device_mesh(), comm_mode, extra=changes)
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot

@pytest.mark.distributed(world_size=2)
def test_uncompared(device_mesh, comm_mode):
    train(device_mesh(), comm_mode)

@pytest.mark.distributed(world_size=2)
def test_dies(dist_info):
    if "CHANGED" in os.environ and dist_info.rank == 1:
        os._exit(3)

def test_in_this_process(fsdp_tree, comm_snapshot):
    assert fsdp_tree(nn.Linear(2, 2)) == comm_snapshot(allow_empty=True)

def test_of_others():
    pass

def test_last():
    if "INTERRUPTED" in os.environ:
        raise KeyboardInterrupt
"""
HOSTILE = r"test_step[</script><b>&'\U0001f41b]"


def index_of(directory):
    """The rows of the index by name of the test: result, and page."""
    text = (directory / "index.html").read_text(encoding="utf-8").replace("<wbr>", "")
    check_page(text)
    rows = re.findall(
        r'<a href="(tests/[^"]*)">(.*?)</a>.*?</span> ([^<]*)<', text, flags=re.DOTALL
    )
    return {
        html.unescape(name): (result, (directory / page).read_text(encoding="utf-8"))
        for page, name, result in rows
    }


def end(path, *arguments):
    process = running.start(path, "-p", "no:randomly", *arguments, python=running.PYTHON)
    out, _ = process.communicate(timeout=extend_under_load(120))
    return process.returncode, out


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The same run in two workers of xdist, and in one process until it is interrupted."""
    pytest.importorskip("xdist")
    path = tmp_path_factory.mktemp("reported")
    (path / "test_it.py").write_text(TESTS, encoding="utf-8")
    status, out = end(path, "--snapshot-update", "-k", "test_step")
    assert status == 0, out
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHANGED", "1")
        workers = end(path, "--comm-report", "of/workers", "-n", "2")
        patch.setenv("INTERRUPTED", "1")
        alone = end(path, "--comm-report", "alone")
    return path, {"alone": alone, "of/workers": workers}


DIRECTORIES = pytest.mark.parametrize("directory", ["alone", "of/workers"])


@DIRECTORIES
def test_the_index_lists_each_test_once_failures_first(reported, directory):
    path, ended = reported
    assert f"fsdp-comm: report: {directory}/index.html" in ended[directory][1]
    rows = index_of(path / directory)
    assert {name: result for name, (result, _) in rows.items()} == {
        HOSTILE: "differs",
        "test_dies": "failed",
        "test_step[same]": "matches snapshot",
        "test_uncompared": "not compared",
        "test_in_this_process": "no snapshot",
    }
    assert list(rows)[:3] == [HOSTILE, "test_in_this_process", "test_dies"]
    text = (path / directory / "index.html").read_text(encoding="utf-8")
    assert ("The session was stopped" in text) == (directory == "alone")


@DIRECTORIES
def test_a_failed_comparison_reads_as_on_the_terminal(reported, directory):
    path, ended = reported
    _, page = index_of(path / directory)[HOSTILE]
    read = check_page(page)
    text = " ".join("".join(read.text).split())
    lines = re.findall(r"^E +(?:cost: |likely: )?(.*)$", ended[directory][1], flags=re.MULTILINE)
    first = next(n for n, line in enumerate(lines) if "comm_mode and fsdp_tree differ" in line)
    accept = next(n for n, line in enumerate(lines) if n > first and line.startswith("accept"))
    told = [line for line in lines[first + 1 : accept] if not line.endswith("below")]
    assert len(told) > 2
    for line in told:
        assert " ".join(line.split()) in text
    assert "1: is now a unit (fsdp2)" in text
    assert "Ranks 0-1" in text
    assert "Before: the snapshot" in text
    assert "Snapshots do not contain the order" in text


@DIRECTORIES
def test_each_kind_of_test_has_a_page_of_its_own(reported, directory):
    path, _ = reported
    rows = index_of(path / directory)
    recorded, tree, died = (
        rows[name][1] for name in ("test_uncompared", "test_in_this_process", "test_dies")
    )
    for page in (recorded, tree, died):
        check_page(page)
    assert "<figure" in recorded
    assert "Calls and bytes" in recorded
    assert "Units and parameters" in tree
    assert "Rank 1 ended without sending a recording" in died
    assert "exited with status 3" in died


def test_report_in_one_file_has_all_tests(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("--comm-report=out/report.html", "-k", "in_this or step")
    result.stdout.fnmatch_lines(["fsdp-comm: report: out/report.html"])
    text = (pytester.path / "out/report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    check_page(text)
    assert text.count("<article ") == 3
    assert "pytest-fsdp-comm " in text
    assert [*(pytester.path / "out").iterdir()] == [pytester.path / "out/report.html"]


def test_report_that_cannot_be_written_is_named(pytester):
    pytester.makepyfile("def test_it(): pass")
    (pytester.path / "file").write_text("kept")
    result = pytester.runpytest_subprocess("--comm-report=file")
    result.assert_outcomes(passed=1)
    problem = (
        "fsdp-comm: the report file/index.html is not complete: *Not a directory: *file/tests'"
    )
    result.stdout.fnmatch_lines([problem])


@pytest.mark.cold
def test_without_the_option_the_report_is_not_imported(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_it(request):
            assert not [name for name in sys.modules if "run_report" in name or "jinja2" in name]
            assert not request.config.pluginmanager.has_plugin("fsdp-comm-report")
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
