"""No name adds a control character or a line to a terminal, a summary or a file."""

import os
import re
import subprocess
import unicodedata

import pytest
import running
from markdown_it import MarkdownIt

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

# As it stands in the source of a test: no control character is in the file itself.
# pytest itself prints ids of tests, so these must not contain "##[".
HOSTILE = r"::stop-commands::a\x1b[31m\n::error::x\r##[error]`|<b>\u202e\u2028"
ESCAPED = r"\x3a:stop-commands::a\x1b[31m\n::error::x\r\x23#[error]`|<b>\u202e\u2028"
HEAD = f"""
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

NAME = "{HOSTILE}"
SURROGATE = NAME + "\\udc80"
LOADER = NAME + "loader"
"""
SOURCE = (
    HEAD
    + """
COUNT = int(os.environ["COUNT"])

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter(SURROGATE, nn.Parameter(torch.ones(4, 4)))

    def forward(self, x):
        return x @ getattr(self, SURROGATE)

Layer.__name__ = Layer.__qualname__ = NAME

def make(mesh):
    model = nn.Sequential()
    for number in range(COUNT):
        model.add_module(NAME + str(number), Layer())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("value", [1], ids=["x::y, 100%|`<i>" + NAME.replace("#", "")])
def test_step(value, device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = make(device_mesh(**{NAME: 2}))
    group = dist.new_group([0, 1], group_desc=NAME + "group")
    with comm_mode(model):
        model(torch.ones(2, 4)).sum().backward()
        for _ in range(COUNT):
            dist.all_reduce(torch.ones(1), group=group)
    tree = fsdp_tree(model)
    print(comm_mode, tree, comm_mode.recording.mesh_axes)
    fsdp_tree.show(tree)
    fsdp_tree.save(tree, os.environ["TOP"] + "/tree.html")
    comm_mode.save(os.environ["TOP"] + "/step.json")
    assert {"comm": comm_mode, "tree": tree} == comm_snapshot(name=NAME)

@pytest.mark.distributed(world_size=2, backend="fake")
def test_axis(device_mesh, comm_mode, comm_snapshot):
    model = make(device_mesh(**{NAME + "2" * COUNT: 2}))
    with comm_mode(model):
        model(torch.ones(2, 4))
    assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("ask", ["axis", "owner", "kind", "phase"])
def test_question(device_mesh, comm_mode, ask):
    model = make(device_mesh(**{NAME: 2}))
    with comm_mode(model):
        model(torch.ones(2, 4))
    comm_mode.counts(**{ask: SURROGATE})

@pytest.mark.distributed(world_size=2, backend="fake")
def test_answer(device_mesh, comm_mode):
    model = make(device_mesh(**{NAME: 2}))
    with comm_mode(model):
        model(torch.ones(2, 4))
    assert comm_mode.counts("all_gather", axis=NAME) == 77

@pytest.mark.distributed(world_size=2, backend="fake")
def test_findings(device_mesh, fsdp_tree):
    model = make(device_mesh(**{NAME: 2}))
    model.add_module(SURROGATE + "tail", Layer())
    assert not fsdp_tree(model).findings

@pytest.mark.distributed(world_size=2, backend="fake")
def test_idle(device_mesh, comm_mode, comm_snapshot):
    other, model = Layer(), make(device_mesh())
    with comm_mode(other):
        model(torch.ones(2, 4))
    assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_hang(dist_info):
    group = dist.new_group([0, 1], group_desc=NAME + "group")
    if dist_info.rank == 0:
        dist.all_reduce(torch.ones(1), group=group)

@pytest.mark.distributed(world_size=2)
def test_loader(comm_mode, comm_snapshot):
    go = threading.Event()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    def work():
        go.wait()
        backend.allreduce([torch.ones(1)]).wait()  # which no recording has
    thread = threading.Thread(target=work, name=LOADER)
    thread.start()
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        go.set()
        thread.join()
    assert comm_mode == comm_snapshot
"""
)
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:randomly")
LOCAL = "a\x1b[31m\n::error::x\u202e"
"""A directory, by which pytest itself prints every test."""


def control_characters(text):
    return [
        character
        for character in text
        if character not in "\n\t"
        and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    ]


def raw(text):
    """What leads a reader astray: control characters, and lines that begin as a name says."""
    commands = re.findall(r"(?m)^[ E]*::(?:error::|stop-commands).*$|##\[", text)
    return control_characters(text) + commands


def run(tmp_path_factory, run_pytest, directory):
    top = tmp_path_factory.mktemp("checkout")
    tests = top / "tests" / directory
    tests.mkdir(parents=True)
    (tests / "test_it.py").write_text(SOURCE.replace("TIMEOUT_S", str(extend_under_load(3))))
    (top / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    environment = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(top),
        "GITHUB_SERVER_URL": "https://github.example",
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_SHA": "0123abc",
        "GITHUB_STEP_SUMMARY": str(top / "summary.md"),
        "TOP": str(top),
    }
    run_pytest(top, "--snapshot-update", "-k", "step or axis", environment | {"COUNT": "2"})
    output = run_pytest(
        top,
        *("--comm-artifacts=kept", "--comm-report=report", "--junitxml=junit.xml", "-vv"),
        environment | {"COUNT": "3"},
    )
    return top, output


@pytest.fixture(scope="module")
def run_pytest():
    def start(top, *arguments):
        *arguments, environment = arguments
        environment = {**os.environ, **environment, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        for name in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "CI"):
            environment.pop(name, None)
        process = subprocess.run(
            [running.PYTHON, "-m", "pytest", *PLUGINS, *arguments],
            cwd=top,
            env=environment,
            capture_output=True,
            timeout=extend_under_load(300),
            check=False,
        )
        return (process.stdout + process.stderr).decode("utf-8", "surrogateescape")

    return start


@pytest.fixture(scope="module")
def plain(tmp_path_factory, run_pytest):
    return run(tmp_path_factory, run_pytest, "there")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, run_pytest):
    return run(tmp_path_factory, run_pytest, LOCAL)


def test_no_name_controls_the_terminal(plain):
    _, output = plain
    assert "11 failed" in output
    assert not raw(output)
    for part in (
        f"all_reduce[{ESCAPED}group] 2 -> 3 (+1)",
        f"rank 0 waits in all_reduce #1 of {ESCAPED}group",
        f"no module of the {ESCAPED}",
        f"mesh axis {ESCAPED}",
    ):
        assert part in output, part


@pytest.mark.parametrize("session", ["plain", "hostile"])
def test_names_are_escaped_in_every_file(request, session):
    top, _ = request.getfixturevalue(session)
    # Of a directory, pytest itself writes the name into its XML.
    files = [top / "junit.xml"] if session == "plain" else []
    files += [top / name for name in ("summary.md", "tree.html", "step.json")]
    for directory in ("kept/received", "report", "snapshots"):
        found = [path for path in (top / directory).rglob("*") if path.is_file()]
        assert found, directory
        files += found
    for file in files:
        text = file.read_text(encoding="utf-8")
        # Nobody prints pages and recordings as they are.
        leaks = raw(text) if file.suffix in {".comm", ".md", ".xml"} else control_characters(text)
        assert not leaks, (file, leaks)


@pytest.mark.parametrize("session", ["plain", "hostile"])
def test_no_name_begins_or_breaks_an_annotation(request, session):
    _, output = request.getfixturevalue(session)
    lines = output[output.index("\n::error file=") :].splitlines()
    commands = [line for line in lines if line.startswith("::error ")]
    # One of each line that issues calls, one of a change without a line, and one of the hang.
    assert len(commands) == 7
    assert not any(map(raw, commands))


def test_a_summary_shows_names_as_text(plain):
    top, _ = plain
    shown = MarkdownIt("gfm-like", {"linkify": False}).render((top / "summary.md").read_text())
    assert "<b>" not in shown
    assert "<i>" not in shown
