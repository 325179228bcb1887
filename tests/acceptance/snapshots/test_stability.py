"""The same communication gives the same snapshot, whatever else changes around it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import running

MODELS = Path(__file__).parents[2] / "models.py"

SOURCE = """
import os
import pytest
import torch
import torch.distributed as dist
from models import Block, Model, step
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

VARIANT = os.environ.get("VARIANT", "")
pytestmark = pytest.mark.distributed(
    world_size=2, scope="module" if VARIANT == "leftovers" else "test"
)

if VARIANT == "renamed":
    Block.__name__ = Block.__qualname__ = "DecoderLayer"
    Model.__name__ = Model.__qualname__ = "Decoder"

def wrapped(layer):
    if VARIANT == "compiled":
        return torch.compile(layer, backend="aot_eager")
    return checkpoint_wrapper(layer) if VARIANT == "checkpointed" else layer

def test_before(device_mesh):
    # What it leaves behind: groups with counted names, hooks, a dispatched model in cycles.
    for _ in range(3):
        dist.new_group([0, 1])
    mesh = device_mesh(other=2)
    model = fully_shard(Model(), mesh=mesh)
    model.register_full_backward_hook(lambda *_: None)
    model.cycle = [model]
    step(model)

@pytest.mark.filterwarnings("ignore")
def test_fsdp2(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = Model()
    for n, layer in enumerate(model.layers):
        model.layers[n] = wrapped(layer)
        fully_shard(model.layers[n], mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())
    target = torch.compile(model, backend="aot_eager") if VARIANT == "all compiled" else model
    with comm_mode(target):
        step(target)
    assert comm_mode == comm_snapshot
    assert fsdp_tree(target) == comm_snapshot(name="tree")

@pytest.mark.filterwarnings("ignore")
def test_fsdp1(comm_mode, comm_snapshot):
    model = Model()
    if VARIANT != "compiled":  # which FSDP1 cannot wrap from inside
        for n, layer in enumerate(model.layers):
            model.layers[n] = wrapped(layer)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    step(model)
    with comm_mode(model):
        step(model)
    assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, scope="test")
def test_not_first_on_any_rank(comm_mode, comm_snapshot, dist_info):
    # One line for both ranks, whichever of them is faster.
    with comm_mode:
        dist.all_reduce(torch.ones(dist_info.world_size))
    assert comm_mode == comm_snapshot
"""


CONFTEST = """
import os

def pytest_collection_modifyitems(items):
    if os.environ.get("VARIANT") == "reversed":
        items.reverse()
"""


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """The folder of what the plain variant recorded."""
    project = tmp_path_factory.mktemp("recorded")
    (project / "test_it.py").write_text(SOURCE)
    shutil.copy(MODELS, project)
    names = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--snapshot-update"],
        cwd=project,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 snapshots generated" in done.stdout, done.stdout
    return project / "snapshots"


@pytest.fixture
def recorded(pytester, snapshots):
    pytester.makepyfile(test_it=SOURCE, models=MODELS.read_text())
    pytester.makeconftest(CONFTEST)
    shutil.copytree(snapshots, pytester.path / "snapshots")
    return pytester


@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        pytest.param("", (), marks=pytest.mark.upstream),
        pytest.param("", ("-n", "2"), marks=pytest.mark.upstream),
        ("reversed", ()),
        pytest.param("leftovers", (), marks=pytest.mark.release),
        pytest.param("renamed", (), marks=pytest.mark.release),
        pytest.param("compiled", (), marks=pytest.mark.release),
        pytest.param("all compiled", (), marks=[pytest.mark.upstream, pytest.mark.release]),
        ("checkpointed", ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value or "plain",
)
def test_equivalent_runs_have_the_same_snapshot(recorded, monkeypatch, variant, arguments):
    monkeypatch.setenv("VARIANT", variant)
    result = recorded.runpytest_subprocess("-q", *arguments)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*4 snapshots passed*"])


@pytest.mark.release
@pytest.mark.cold  # a forked session has the hash seed of the first process
@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_hash_seed_changes_no_byte_of_a_snapshot(recorded, monkeypatch, seed):
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    before = {path: path.read_bytes() for path in recorded.path.rglob("*.comm")}
    assert len(before) == 4
    # An update writes what differs, if only by the order of its lines.
    recorded.runpytest_subprocess("--snapshot-update").assert_outcomes(passed=4)
    assert {path: path.read_bytes() for path in recorded.path.rglob("*.comm")} == before
