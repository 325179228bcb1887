"""Plugins that are only tested where they are installed, which is beside the suite.

Some cannot live with pytester's sessions in this process, so they have a directory of their own::

    pip install --target DIR --no-deps allure-pytest allure-python-commons flaky py py-cpuinfo \\
        pytest-benchmark pytest-forked pytest-html pytest-json-report pytest-metadata pytest-retry
    PYTHONPATH=DIR pytest tests/acceptance/test_installed_plugins.py

Run with allure-pytest 2.16, flaky 3.8, pytest-benchmark 5.3, pytest-forked 1.7, pytest-html 4.2,
pytest-json-report 1.5 and pytest-retry 1.7.
"""

import json
import re
import xml.etree.ElementTree as ET
from importlib import util

import pytest

SOURCE = """
import os
import pathlib

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=30)

def note(name, dist_info):
    with open(f"{name}.{dist_info.rank}", "a") as file:
        file.write(".")
    print("said by", dist_info.rank)

@pytest.mark.flaky
def test_failing(dist_info):
    note("failing", dist_info)
    assert dist_info.rank == 0
    dist.all_reduce(torch.ones(1))

def test_passing(dist_info): note("passing", dist_info)

def test_benchmark(benchmark): benchmark(dist.barrier)
"""


def session(run_session, *arguments, plugins):
    modules = {
        "pytest-retry": "pytest_retry",
        "html_fixtures": "pytest_html",
        "html": "pytest_html",
        "metadata": "pytest_metadata",
        "benchmark": "pytest_benchmark",
    }
    for name in plugins:
        if util.find_spec(modules.get(name, name)) is None:
            pytest.skip(f"{name} is not installed")
    return run_session(SOURCE, "-v", *arguments, plugins=plugins)


@pytest.mark.parametrize(
    ("name", "arguments"), [("pytest-retry", ["--retries=2"]), ("flaky", []), ("pytest_forked", [])]
)
def test_no_plugin_runs_a_test_again_in_one_rank(run_session, name, arguments):
    arguments = ["--forked"] if name == "pytest_forked" else arguments
    ran = session(run_session, *arguments, "-k", "not benchmark", plugins=[name])
    assert "1 failed, 1 passed, 1 deselected" in ran.output
    for test in ("failing", "passing"):
        assert {(ran.path / f"{test}.{rank}").read_text() for rank in (0, 1)} == {"."}
    assert ran.output.count(f"{name} did not run this test again") == (name != "pytest_forked")


def test_reports_have_each_test_once_with_the_output_of_all_ranks(run_session):
    ran = session(
        run_session,
        *("--alluredir=allure", "--html=report.html", "--json-report", "--junitxml=report.xml"),
        plugins=["allure_pytest", "html", "html_fixtures", "metadata", "pytest_jsonreport",
                 "benchmark"],
    )  # fmt: skip
    assert re.search(r"1 failed, 1 passed, (?:\d+ warnings?, )?1 error", ran.output)
    assert "benchmark of pytest-benchmark does not work in a distributed test" in ran.output
    results = [json.loads(path.read_text()) for path in ran.path.glob("allure/*-result.json")]
    assert {(one["name"], one["status"]) for one in results} == {
        ("test_failing", "failed"), ("test_passing", "passed"), ("test_benchmark", "broken")
    }  # fmt: skip
    assert len(results) == 3
    (failed,) = (one for one in results if one["status"] == "failed")
    assert failed["fullName"] == "test_it#test_failing"
    assert "assert 1 == 0" in failed["statusDetails"]["message"]
    both = ("said by 0", "said by 1")
    tests = json.loads((ran.path / ".report.json").read_text())["tests"]
    assert [test["nodeid"].partition("::")[2] for test in tests][:2] == [
        "test_failing", "test_passing"
    ]  # fmt: skip
    for test in tests[:2]:
        assert all(text in test["call"]["stdout"] for text in both)
    html = (ran.path / "report.html").read_text()
    assert all(html.count(text) >= 2 for text in both)
    cases = list(ET.parse(ran.path / "report.xml").getroot().iter("testcase"))  # noqa: S314  # our own file
    assert len(cases) == 3
