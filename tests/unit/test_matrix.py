"""Every version that docs/torch-versions.md or a text names has a run that passed."""

import ast
import json
import re
import runpy
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from pytest_fsdp_comm.upstream import VERSIONS_READ

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TABLE = runpy.run_path(str(DOCS / "matrix_table.py"))
MATRIX = runpy.run_path(str(ROOT / "tests" / "matrix.py"))
COMBINATIONS = MATRIX["COMBINATIONS"]
RECORDS = {file.stem: json.loads(file.read_text()) for file in (DOCS / "matrix").glob("*.json")}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def series(version):
    return ".".join(version.split(".")[:2])


def ran(records):
    """Return each package with the version series that passed."""
    return {
        (package, series(version))
        for record in records
        if not record["failed"]
        for package, version in record["versions"].items()
    }


def named_in(text):
    """Return the versions of torch and Python in a text, including lists such as 2.7 and 2.8."""
    for package, versions in re.findall(
        r"\b(torch|python)\s*[>=~]*\s*((?:[23]\.\d+(?:\.\d+)?(?:,? (?:and|or|to) |, )?)+)",
        text,
        re.IGNORECASE,
    ):
        for version in re.findall(r"[23]\.\d+", re.sub(r"(\.\d+)\.\d+", r"\1", versions)):
            yield package.lower(), version


def required():
    """Return the lowest version of each dependency that the package allows."""
    requirements = [*PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"]["test"]]
    for package, version in re.findall(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", "\n".join(requirements)):
        if package in {"torch", "pytest", "syrupy", "jinja2", "pytest-xdist"}:
            yield package, series(version + ".0")
    yield "python", PYPROJECT["requires-python"].removeprefix(">=")
    for classifier in PYPROJECT["classifiers"]:
        if match := re.fullmatch(r"Programming Language :: Python :: (\d\.\d+)", classifier):
            yield "python", match[1]


def claims():
    """Return the place, package and version of every claim that a version works."""
    yield from (("pyproject.toml", *claim) for claim in required())
    texts = {page: page.read_text() for page in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    # Skip the table, which lists failed runs too.
    page = DOCS / "torch-versions.md"
    texts[page] = texts[page].replace(TABLE["table"](), "")
    for file in (ROOT / "pytest_fsdp_comm").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        # Docstrings and texts for users.
        strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
        texts[file] = "\n".join(string for string in strings if isinstance(string, str))
    for file, text in texts.items():
        yield from ((str(file.relative_to(ROOT)), *claim) for claim in named_in(text))
    read = re.findall(r"\d\.\d+", VERSIONS_READ["torch"])
    yield from (("VERSIONS_READ", "torch", version) for version in read)


def test_the_page_shows_the_runs():
    assert TABLE["table"]() in (DOCS / "torch-versions.md").read_text(), (
        "run: python docs/matrix_table.py"
    )


def test_each_combination_was_run_with_its_versions():
    assert RECORDS.keys() == COMBINATIONS.keys(), "run: nox -s matrix"
    for name in RECORDS:
        python, *pinned = COMBINATIONS[name]
        versions = RECORDS[name]["versions"]
        assert series(versions["python"]) == python
        for requirement in pinned:
            package, version = requirement.split("==")
            assert versions[package].partition("+")[0] == version, name
        for run in ("upstream", "examples"):
            assert RECORDS[name]["runs"][run]["passed"] > 0, name


def test_each_record_is_of_this_version():
    for name, record in RECORDS.items():
        assert record["versions"]["pytest-fsdp-comm"] == PYPROJECT["version"], name
        assert not record["commit"].endswith("changes"), name


def test_stale_installation_is_not_recorded(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.1")
    with pytest.raises(SystemExit, match=r"0\.0\.1 is installed"):
        MATRIX["_version"]()


def test_matrix_has_the_lowest_versions():
    lowest = dict(requirement.split("==") for requirement in COMBINATIONS["lowest"][1:])
    allowed = {package: series(version) for package, version in lowest.items()}
    oldest = {"torch": series(COMBINATIONS["torch-2.7.1"][1].partition("==")[2])}
    needs = {package: version for package, version in required() if package != "python"}
    assert needs == allowed | oldest


def test_claimed_versions_have_a_passed_run():
    claimed = {*claims()}
    assert len(claimed) > 20
    passed = ran(RECORDS.values())
    assert {claim for claim in claimed if claim[1:] not in passed} == set()


def test_failed_run_supports_no_version():
    record = {"versions": {"torch": "2.13.0+cpu"}, "failed": []}
    assert ran([record]) == {("torch", "2.13")}
    assert ran([record | {"failed": ["tests.unit.test_it::test_it"]}]) == set()


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passed"/>
<testcase classname="a" name="failed"><failure message="assert"/></testcase>
<testcase classname="a" name="error"><error message="setup"/></testcase>
<testcase classname="a" name="torn"/>
<testcase classname="a" name="torn"><error message="teardown"/></testcase>
<testcase classname="a" name="skipped"><skipped message="needs a GPU"/></testcase>
<testcase classname="" name="tests.test_b"><skipped message="collection skipped"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_pytests_report():
    assert MATRIX["_read"](ET.fromstring(REPORT)) == [  # noqa: S314  # as above
        ("a::passed", "passed", ""),
        ("a::failed", "failed", ""),
        ("a::error", "failed", ""),
        ("a::torn", "failed", ""),
        ("a::skipped", "skipped", "needs a GPU"),
    ]


def test_the_workflow_runs_each_combination():
    workflow = yaml.safe_load((ROOT / ".github/workflows/upstream.yml").read_text())
    strategy = workflow["jobs"]["matrix"]["strategy"]
    assert strategy["matrix"]["record"] == [*COMBINATIONS]
    assert strategy["fail-fast"] is False
