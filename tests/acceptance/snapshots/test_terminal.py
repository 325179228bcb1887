"""The text of a failed comparison in logs, on a terminal, in pytest's summary and JUnit XML."""

import re
from xml.etree import ElementTree as ET

import pytest

# The ranks run on the fake group, as the output does not depend on the backend.
SOURCE = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

CHANGED = False

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.body = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        self.lm_head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.body(self.embed(x))
        parts = x.chunk(4) if CHANGED else [x]
        return torch.cat([self.lm_head(part) for part in parts])

def make(mesh):
    model = Head()
    for layer in model.body:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not CHANGED)
    if CHANGED:
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def step(comm_mode, model):
    with comm_mode(model):
        model(torch.randn(4, 8)).sum().backward()

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_train_step(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = make(device_mesh())
    step(comm_mode, model)
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_message(device_mesh, comm_mode, comm_snapshot):
    model = make(device_mesh())
    step(comm_mode, model)
    assert comm_mode == comm_snapshot, "a message of the user's own"

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_tree(device_mesh, fsdp_tree, comm_snapshot):
    assert fsdp_tree(make(device_mesh())) == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_caught(device_mesh, comm_mode, comm_snapshot):
    model = make(device_mesh())
    step(comm_mode, model)
    try:
        assert comm_mode == comm_snapshot
    except AssertionError:
        pass
    assert not CHANGED, "after a comparison that was caught"

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_broken(comm_mode, comm_snapshot):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_first(comm_mode, comm_snapshot):
    comm_snapshot = comm_snapshot(allow_unused=True)
    if CHANGED:
        with comm_mode:
            dist.all_reduce(torch.ones(2))
        assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake", ranks=(0, 1))
def test_neighbour(comm_mode, comm_snapshot):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot
    assert not CHANGED
"""
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
FOLDER = "tests/models"
# The first change, with one all-gather in each of four calls, forward and backward. The others: the
# body is no longer gathered in backward, and two units of the tree.
HEADLINE = (
    "lm_head split off from unit (root), gathered 4 times in forward: 8 calls, 2.0 KiB in total, "
    "3 more changes"
)


class Project:
    def __init__(self, pytester):
        self.path = pytester.path
        self.pytester = pytester
        folder = pytester.mkdir("tests") / "models"
        folder.mkdir()
        self.file = folder / "test_llama.py"
        self.file.write_text(SOURCE)
        pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")

    def run(self, *arguments):
        return self.pytester.runpytest_subprocess(*arguments)


@pytest.fixture(scope="module")
def snapshots():
    """Return the recorded files by name, the same for all tests."""
    return {}


@pytest.fixture
def changed(pytester, monkeypatch, snapshots):
    monkeypatch.setenv("COLUMNS", "80")
    project = Project(pytester)
    root = project.path / "snapshots"
    if not snapshots:
        project.run("--snapshot-update").assert_outcomes(passed=7)
        snapshots |= {file.relative_to(root): file.read_text() for file in root.rglob("*.comm")}
    for name, text in snapshots.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    project.file.write_text(SOURCE.replace("CHANGED = False", "CHANGED = True"))
    broken = project.path / "snapshots" / FOLDER / "test_llama/test_broken.ws2.comm"
    broken.write_text(broken.read_text().replace("x1 of", "x1 off"))
    return project


def failure(result, test):
    """Return the lines from one failure's title to the next."""
    lines = [ESCAPE.sub("", line) for line in result.outlines]
    start = next(n for n, line in enumerate(lines) if re.fullmatch(f"_+ {test} _+", line))
    after = r"_{3}|={3}|-+ (?:snapshot|generated)"
    end = next(n for n, line in enumerate(lines) if n > start and re.match(after, line))
    return [line for line in lines[start:end] if not re.match(r"\[gw\d+\] ", line)]


def explained(lines):
    """Return the lines of pytest's explanation, and of the section below it."""
    shown = [re.sub(r"^E +(?:assert )?", "", line) for line in lines if re.match(r"E  ", line)]
    titles = [n for n, line in enumerate(lines) if re.fullmatch("-+ comparison -+", line)]
    return shown, lines[titles[0] + 1 :] if titles else []


def line_of(text):
    """Return the number of the first source line that contains a text."""
    return next(n for n, line in enumerate(SOURCE.splitlines(), start=1) if text in line)


def summary(result):
    """Return the line of each test in the summary."""
    found = (
        re.match(r"FAILED tests/models/test_llama.py::(\w+)(?: - (.*))?", line)
        for line in (ESCAPE.sub("", line) for line in result.outlines)
    )
    return {match[1]: match[2] for match in found if match}


def test_eight_lines_and_a_headline(changed):
    result = changed.run()
    result.assert_outcomes(failed=7)
    lines = failure(result, "test_train_step")
    shown, below = explained(lines)
    where = "snapshots/tests/models/test_llama/test_train_step.ws2"
    assert shown[0] == f"comm_mode and fsdp_tree differ from {where} (2 files)"
    assert shown[-1] == (
        'accept: pytest --snapshot-update "tests/models/test_llama.py::test_train_step"'
    )
    # The changes, their causes, then their costs.
    assert shown[1].startswith("lm_head split off from unit (root), gathered 4 times in forward: ")
    assert shown[2] == "tree: body.{0..3}: reshard_after_forward True -> False"
    told = [line.strip().partition(": ")[0] for line in (*shown[3:-2], *below)]
    assert told.index("likely") < told.index("cost")
    assert any(line.startswith("  cost: +30 % bytes in all_gather[dp] ") for line in below)
    assert shown[-2] == f"... and {len(below)} more lines below"
    assert len(shown) <= 8
    assert below
    # The arguments: one short line each, or two in one.
    arguments = lines[2 : lines.index("", 2)]
    assert arguments == [
        "device_mesh = <MakeDeviceMesh of 2 ranks>",
        # The root and four layers gathered once, lm_head four times and four times again; each of
        # the six units reduced once. 256 bytes each.
        "comm_mode = <CommMode: 19 collectives, 4.8 KiB>, fsdp_tree = <TreeFactory>",
        "comm_snapshot = <CommSnapshot of test_train_step>",
    ]
    # The summary names module and change as far as the line goes, and so for each kind of failure.
    cut = summary(result)
    assert cut["test_train_step"] == "lm_head split off from u..."
    assert cut["test_tree"] == "body.{0..3}: reshard_after_for..."
    assert cut["test_broken"] == "snapshot line 4: it reads 'o..."
    assert cut["test_first"] == "no snapshot yet"
    # Other failures look as without the plugin.
    assert cut["test_message"].startswith("AssertionError: a message")
    assert cut["test_caught"].startswith("AssertionError: after a")
    assert cut["test_neighbour"] == "assert not True"
    assert "\x1b[" not in result.stdout.str()


def test_verbose_and_ci_print_each_line_once(changed, monkeypatch):
    verbose = changed.run("-vv", "-k", "train_step or neighbour")
    shown, below = explained(failure(verbose, "test_train_step"))
    for line in (
        "lm_head split off from unit (root), gathered 4 times in forward: "
        "8 calls, 2.0 KiB in total, at "
        f"tests/models/test_llama.py:{line_of('self.lm_head(part)')}",
        "body.{0..3} no longer resharded after forward, so not gathered again in backward: "
        "-4 calls, -1.0 KiB",
        "tree: lm_head: is now a unit (fsdp2)",
    ):
        assert shown.count(line) == 1
    assert sum(line.startswith("likely: ") for line in shown) == 2
    assert not [line for line in (*shown, *below) if "-vv" in line]
    assert "+ forward lm_head all_gather[dp] x4 of 256 B float32 parameters" in below
    assert "+ unit lm_head fsdp2 shard=dp reshard_after_forward=true" in below
    lines = [line for line in (*shown, *below) if line not in {"  ...", "  end", "  world_size 2"}]
    assert len(lines) == len(set(lines))
    # Not truncated, in one line.
    assert summary(verbose)["test_train_step"] == HEADLINE
    monkeypatch.setenv("CI", "true")
    on_ci = changed.run("-k", "train_step or neighbour")
    assert explained(failure(on_ci, "test_train_step")) == (shown, below)
    assert summary(on_ci) == {"test_train_step": HEADLINE, "test_neighbour": "assert not True"}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="serial", marks=pytest.mark.release),
        pytest.param(("-n", "2"), id="xdist"),
    ],
)
def test_junit_has_the_headline_and_no_colours(changed, arguments):
    chosen = ("-vv", "-k", "train_step or tree or neighbour", "--junitxml=junit.xml", *arguments)
    result = changed.run("--color=yes", *chosen)
    result.assert_outcomes(failed=3)
    written = (changed.path / "junit.xml").read_text()
    assert "\x1b" not in written
    assert "#x1B" not in written
    cases = ET.fromstring(written).iter("testcase")  # noqa: S314  # pytest wrote it
    found = {case.attrib["name"]: case.find("failure") for case in cases}
    assert found["test_train_step"].attrib["message"] == HEADLINE
    assert "- comparison -" in found["test_train_step"].text
    assert found["test_neighbour"].attrib["message"] == "assert not True"


def test_report_of_call_has_the_properties(changed):
    """Plugins that write other reports than JUnit XML may not wait for the teardown."""
    changed.pytester.makeconftest(
        """
        def pytest_runtest_logreport(report):
            if report.when == "call":
                print(report.user_properties)
        """
    )
    result = changed.run("-s", "-k", "train_step")
    assert f"('comm_headline', {HEADLINE!r})" in result.stdout.str()


@pytest.mark.parametrize("style", ["short", "line", "native", "no"])
def test_each_style_of_traceback_has_the_headline_once(changed, style):
    result = changed.run(f"--tb={style}", "-k", "tree or neighbour", "--color=yes")
    result.assert_outcomes(failed=2)
    text = ESCAPE.sub("", result.stdout.str())
    line = line_of("assert fsdp_tree(make(")
    crash = (
        f"{changed.file}:{line}: body.{{0..3}}: reshard_after_forward True -> False, 1 more change"
    )
    assert text.count(crash) == (style == "line")
    # pytest 8 shows nothing else with --tb=line.
    assert text.count("fsdp_tree differs from") == (style != "no") or style == "line"
    assert summary(result)["test_tree"].startswith("body.{0..3}: reshard_")
    assert summary(result)["test_neighbour"] == "assert not True"


def test_other_failures_of_ranks_keep_the_headline(changed):
    source = changed.file.read_text().replace(
        "    model = make(device_mesh())\n    step(comm_mode, model)\n    assert {",
        "    model = make(device_mesh())\n    step(comm_mode, model)\n"
        "    if device_mesh().get_rank() == 1:\n"
        ""
        "        request.addfinalizer(lambda: 1 / 0)\n"
        "    assert {",
    )
    source = source.replace("def test_train_step(", "def test_train_step(request, ")
    changed.file.write_text(source)
    result = changed.run("-k", "train_step", "-vv")
    result.assert_outcomes(failed=1, errors=1)
    assert summary(result)["test_train_step"] == HEADLINE


def test_a_test_without_ranks_has_the_headline_too(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    pytester.makepyfile(
        test_plain="""
        import pytest
        from pytest_fsdp_comm.comm.events import Phase
        from pytest_fsdp_comm.comm.calls import Calls
        from pytest_fsdp_comm.comm.profile import CommProfile, Row
        from pytest_fsdp_comm.comm.mesh import MeshAxis

        COUNT = 1

        class Recorded:
            def merged_profile(self, *, allow_divergence=False):
                row = Row(
                    phase=Phase.FORWARD, owner="layers.3", what="all_gather", axis="dp",
                    calls=(Calls(count=COUNT, nbytes=8, dtype="float32"),),
                )
                axis = MeshAxis(name="dp", size=2, dims=((2, 1),))
                return CommProfile(world_size=2, mesh_axes=(axis,), rows=(row,), backend="gloo")

        def test_step(comm_snapshot):
            assert Recorded() == comm_snapshot

        def test_other():
            assert COUNT == 1
        """
    )
    pytester.runpytest_subprocess("--snapshot-update").assert_outcomes(passed=2)
    file = pytester.path / "test_plain.py"
    file.write_text(file.read_text().replace("COUNT = 1\n", "COUNT = 4\n"))
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            "FAILED test_plain.py::test_step - layers.3 in forward: all_gather[[]dp] 1 -> 4 "
            "(+3), 8 -> 32 B per rank",
            "FAILED test_plain.py::test_other - assert 4 == 1",
        ]
    )
