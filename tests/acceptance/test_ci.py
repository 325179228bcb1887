"""A session's outputs for reviewers in CI: summary, annotations, JUnit XML."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import running
import yaml

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ci.md").read_text()

CONFTEST = """
import os
import pytest
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.profile import CommProfile, Row, Site

class Recorded:
    # As comm_mode, without torch.
    def merged_profile(self, *, allow_divergence=False):
        nbytes = int(os.environ["NBYTES"])
        row = Row(
            phase=Phase.FORWARD, owner="a_b", what="all_gather", axis="dp",
            calls=(Calls(count=1, nbytes=nbytes, dtype="float32", role="parameters"),),
            sites=(
                Site(
                    issued_in="a_b", call_site="train.py:7",
                    calls=Calls(count=1, nbytes=nbytes, dtype="float32", role="parameters"),
                ),
            ),
        )
        axis = MeshAxis(name="dp", size=2, dims=((2, 1),))
        return CommProfile(world_size=2, mesh_axes=(axis,), rows=(row,), backend="gloo")

@pytest.fixture
def recorded():
    return Recorded()

class AnnotateErrors:
    # As pytest-github-actions-annotate-failures 0.4 does.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.failed:
            print(f"::error::{report.nodeid}")

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(AnnotateErrors(), "annotate_errors")
"""
MODULE = """\
import pytest

@pytest.mark.parametrize("name", ["a|b`", "<i>_x_"])
def test_names(recorded, comm_snapshot, name):
    assert recorded == comm_snapshot

@pytest.mark.distributed(world_size=2)
def test_ranks(recorded, comm_snapshot):
    assert recorded == comm_snapshot

@pytest.mark.distributed(world_size=2)
def test_other(dist_info):
    if "FAILS" in __import__("os").environ:
        assert dist_info.rank == 0, "on one rank"

def test_plain():
    pass
"""
SUMMARY = "summary.md"
FIRST = "first.md"
"""The summary before other tests add to it."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A checkout with the project in a sub-folder, and what a failed job left."""
    top = tmp_path_factory.mktemp("checkout")
    project = top / "packages/my model"
    (project / "tests").mkdir(parents=True)
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "conftest.py").write_text(CONFTEST)
    (project / "tests/test_step.py").write_text(MODULE)
    run(project, "--snapshot-update", NBYTES="100", status=0)
    (top / SUMMARY).write_text("of a step before")
    github = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(top),
        "GITHUB_SERVER_URL": "https://github.example",
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_SHA": "0123abc",
        "GITHUB_STEP_SUMMARY": str(top / SUMMARY),
    }
    stale = project / "snapshots/tests/test_step/test_gone.ws1.comm"
    stale.write_text(next(project.rglob("*.comm")).read_text())
    arguments = ("-n2", "--junitxml=junit.xml", "--comm-summary=out/s.md")
    out = run(project, *arguments, NBYTES="163", FAILS="1", status=1, **github)
    stale.unlink()
    (top / FIRST).write_text((top / SUMMARY).read_text())
    return top, project, out, github


def run(project, *arguments, status, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    # A session within a test would not tell anybody.
    kept.pop("PYTEST_CURRENT_TEST", None)
    kept.pop("CI", None)
    disabled = ("asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout")
    kept["PYTEST_ADDOPTS"] = " ".join(f"-p no:{name}" for name in disabled)
    done = subprocess.run(
        [running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=extend_under_load(300),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


LINK = (
    '<a href="https://github.example/owner/name/blob/0123abc/packages/my%20model/tests/'
    'test_step.py#L{}"><code>tests'
)


def test_summary_is_appended_once_below_other_steps(repository):
    top, _, _, _ = repository
    text = (top / FIRST).read_text()
    assert text.startswith("of a step before\n\n### Communication differs ")
    assert "in 3 tests, 1 more test failed\n\n3 snapshots in 3 tests" in text
    assert text.count("### Communication") == 1
    assert text.count("<details>") == 1
    assert "<summary>3 tests: unit sizes changed: a_b " in text
    # The lines of the assertions.
    assert text.count(LINK.format(5)) == 2
    assert text.count(LINK.format(9)) == 1
    assert text.count(LINK.format(14)) == 1
    assert " | +63 % bytes in all_gather&#91;dp&#93; (100 -&#62; 163 B per rank) |\n" in text
    assert "\ncost: +63 % bytes" in text
    assert "a|b`" not in text.partition("<details>")[0]
    assert "pytest --snapshot-update" in text
    assert "1 snapshot file unused; " in text


def test_outside_github_a_file_gets_the_same_markdown(repository):
    top, project, _, _ = repository
    assert (project / "out/s.md").read_text() == (top / FIRST).read_text().partition("\n\n")[2]


def test_a_cause_of_several_tests_is_one_annotation(repository):
    _, _, out, _ = repository
    found = re.findall(r"^::error file=(.*?),line=(\d+),title=(.*?)::(.*)", out, re.MULTILINE)
    changed = "unit sizes changed: a_b 100 -> 163 B per gather"
    ((path, line, title, message),) = found
    assert (path, line) == ("packages/my model/train.py", "7")
    assert title == changed.replace(":", "%3A")
    assert re.match(rf"{changed}%0Afails tests/test_step.py::test_\S+ and 2 more tests%0A", message)


def test_a_change_of_several_tests_is_printed_once(repository):
    _, _, out, _ = repository
    shared = out.partition("communication changes that failed several tests")[2]
    lines = shared.partition("\n")[2].splitlines()[:5]
    change = "unit sizes changed: a_b 100 -> 163 B per gather, at train.py:7"
    assert lines[0] == f"3 tests: {change}"
    assert max(lines[1:4]) == "  tests/test_step.py::test_ranks"
    assert lines[4].startswith("accept these 3: pytest --snapshot-update ")
    # Each failure has its own command, too.
    assert out.count("pytest --snapshot-update") == 3 + 1 + out.count("%0Aaccept: ")


def test_failure_is_annotated_once_with_other_plugin(repository):
    top, project, distributed_over_workers, github = repository
    alone = {**github, "GITHUB_STEP_SUMMARY": str(top / "other.md")}
    in_one_process = run(project, NBYTES="163", FAILS="1", status=1, **alone)
    for output in (distributed_over_workers, in_one_process):
        # Neither the ranks nor the plugin annotate what is annotated at its line.
        found = re.findall(r"::error (?:.*line=(\d+))?|::error::(.*)", output)
        assert sorted(found) == [("", "tests/test_step.py::test_other"), ("7", "")]


def test_junit_xml_has_headline_cost_and_file(repository):
    _, project, _, _ = repository
    properties = {
        case.get("name"): [(one.get("name"), one.get("value")) for one in case.iter("property")]
        for case in ET.parse(project / "junit.xml").iter("testcase")  # noqa: S314  # our own
    }
    place = "snapshots/tests/test_step"
    assert properties["test_plain"] == []
    assert properties["test_ranks"] == [
        ("comm_snapshot", f"{place}/test_ranks.ws2.comm"),
        ("comm_headline", "unit sizes changed: a_b 100 -> 163 B per gather"),
        ("comm_severity", "change"),
        ("comm_cost", "+63 % bytes in all_gather[dp] (100 -> 163 B per rank)"),
    ]
    assert properties["test_names[a|b`]"][0][1] == f"{place}/test_names[a%7Cb%60].ws1.comm"


def test_passing_session_writes_one_summary_line(repository):
    top, project, _, github = repository
    before = (top / SUMMARY).read_text()
    out = run(project, "-k", "names", NBYTES="100", status=0, **github)
    assert "::error" not in out
    assert (top / SUMMARY).read_text() == (
        f"{before}\n\nCommunication: 2 snapshots in 2 tests compared, all equal.\n\n"
    )
    # Neither without a comparison, nor within a test of another session.
    after = (top / SUMMARY).read_text()
    run(project, "-k", "plain", NBYTES="100", status=0, **github)
    inner = {**github, "PYTEST_CURRENT_TEST": "test_outer.py::test_x (call)"}
    run(project, "-k", "names", "-qq", NBYTES="163", status=1, **inner)
    assert (top / SUMMARY).read_text() == after


def test_unwritable_summary_is_reported_not_fatal(repository):
    top, project, _, github = repository
    broken = {**github, "GITHUB_STEP_SUMMARY": str(top)}
    arguments = ("-k", "names", f"--comm-summary={top}")
    out = run(project, *arguments, NBYTES="100", status=4, **broken)
    assert "fsdp-comm: cannot write GITHUB_STEP_SUMMARY" in out
    assert "fsdp-comm: cannot write --comm-summary" in out
    assert "2 passed" in out


def test_composite_action_in_subfolder_keeps_artifacts(repository, tmp_path):
    top, project, _, github = repository
    action = yaml.safe_load((ROOT / ".github/actions/communication-gate/action.yml").read_text())
    compare, keep = action["runs"]["steps"]
    inputs = {name: value["default"] for name, value in action["inputs"].items()}
    # What the page sets, and more words than a shell would make of them without quotes.
    page = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    given = page["jobs"]["communication"]["steps"][-1]
    assert given["uses"].split("/", 2)[2].startswith(".github/actions/communication-gate@v")
    assert given["with"].keys() <= inputs.keys()
    inputs |= {"working-directory": "packages/my model", "python": running.PYTHON}
    inputs["arguments"] = '-k "names or nothing"\n-p no:randomly --tb=line "-x"'
    environment = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], value)
        for name, value in compare["env"].items()
    }
    assert compare["working-directory"] == "${{ inputs.working-directory }}"
    output = tmp_path / "output"
    before = (top / SUMMARY).read_text()
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        # As GitHub runs a step with `shell: bash`.
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", compare["run"]],  # noqa: S607
        cwd=top / inputs["working-directory"],
        env={
            **kept,
            **github,
            **environment,
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_OUTPUT": str(output),
            "NBYTES": "150",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    name, _, differences = output.read_text().strip().partition("=")
    assert f"steps.compare.outputs.{name}" in keep["with"]["path"]
    assert f"steps.compare.outputs.{name}" in action["outputs"]["differences"]["value"]
    assert len(list(Path(differences, "received").rglob("*.comm"))) == 1
    assert (top / SUMMARY).read_text().startswith(f"{before}\n\n### Communication differs ")
    accepted = subprocess.run(
        [sys.executable, "-m", "pytest_fsdp_comm", "accept", differences],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert accepted.stdout.endswith("1 file accepted\n")


def test_the_page_names_the_inputs_of_the_action():
    action = yaml.safe_load((ROOT / ".github/actions/communication-gate/action.yml").read_text())
    table = PAGE.partition("| input | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(action["inputs"])
