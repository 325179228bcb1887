"""``fsdp_tree`` in real ranks, as a user writes and sees it."""

from pathlib import Path

import pytest

MODELS = (Path(__file__).parents[1] / "models.py").read_text()

PROJECT = """
import pytest
import torch
from torch import nn
from models import Block, UnevenModel
from torch.distributed.fsdp import fully_shard

def shard(model, mesh, blocks=2):
    for layer in model.layers[:blocks]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""


@pytest.fixture
def project(pytester):
    def make(test, **files):
        pytester.makepyfile(test_it=PROJECT + test, models=MODELS, **files)
        return pytester

    return make


def run(pytester, *arguments):
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--world-size", "2", *arguments)


def test_each_rank_has_its_own_numbers_in_the_tree(project):
    pytester = project("""
@pytest.mark.distributed
def test_tree(fsdp_tree, device_mesh):
    model = shard(UnevenModel(10), device_mesh())
    tree = fsdp_tree.of_all_ranks(model)
    assert "layers.1[Block] FULLY SHARDED" in str(tree)
    assert not tree.findings
    for fqn, entry in tree.named_parameters():
        local = model.state_dict()[fqn].to_local().numel()
        assert entry.local_numel == local
    assert fsdp_tree.expect(model, {Block})

@pytest.mark.distributed
def test_ranks_that_differ(fsdp_tree, device_mesh, dist_info):
    model = shard(UnevenModel(10), device_mesh(), blocks=dist_info.rank + 1)
    assert [finding.code for finding in fsdp_tree.of_all_ranks(model).findings][0] == "ranks-differ"

def test_without_ranks(fsdp_tree):
    tree = fsdp_tree(UnevenModel(10))
    assert not tree.is_sharded
    assert tree.world_size == 1
""")
    run(pytester).assert_outcomes(passed=3)


def test_the_bytes_of_a_tree_are_the_bytes_sent(project):
    """Sizes that do not divide, under every kind of sharding, against the recorder."""
    pytester = project("""
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def fsdp2(mesh, **policy):
    model = UnevenModel(10)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh(dp=4), **policy)
    return fully_shard(model, mesh=mesh(dp=4), **policy)

def hsdp(mesh):
    return shard(UnevenModel(10), mesh(replica=2, dp=2))

def tensor_parallel(mesh):
    model, mesh = UnevenModel(10), mesh(dp=2, tp=2)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    return shard(model, mesh["dp"])

def fsdp1(mesh):
    model, options = UnevenModel(10), {"device_id": torch.device("cpu"), "use_orig_params": True}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BUILDS = {
    "fsdp2": fsdp2,
    "int": lambda mesh: fsdp2(mesh, reshard_after_forward=2),
    "bf16": lambda mesh: fsdp2(mesh, mp_policy=BF16),
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "fsdp1": fsdp1,
}

@pytest.mark.distributed(world_size=4, scope="module")
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_bytes(build, fsdp_tree, comm_mode, device_mesh):
    model = build(device_mesh)
    tree = fsdp_tree.of_all_ranks(model)
    assert not [finding for finding in tree.findings if finding.level == "error"]
    with comm_mode(model):
        model(torch.ones(2, 5)).sum().backward()
    units = {tree.unit_name(index): unit for index, unit in enumerate(tree.units)}
    sent = [
        (entry.owner, entry.nbytes)
        for entry in comm_mode.recording.collectives
        if (entry.kind, entry.phase, entry.source) == ("all_gather", "forward", "fsdp")
    ]
    assert sent == [(name, units[name].nbytes_gathered) for name in ("", "layers.0", "layers.1")]
""")
    run(pytester).assert_outcomes(passed=6)


SNAPSHOT_TEST = """
@pytest.mark.distributed
def test_tree(fsdp_tree, device_mesh, comm_snapshot):
    assert fsdp_tree(shard(UnevenModel(10), device_mesh())) == comm_snapshot(name="tree")
"""


def test_a_changed_tree_fails_in_fsdp_terms(project):
    pytester = project(SNAPSHOT_TEST)
    run(pytester, "--snapshot-update").assert_outcomes(passed=1)
    (file,) = pytester.path.glob("snapshots/**/*.comm")
    assert "unit layers.{0..1} fsdp2 shard=dp reshard_after_forward=true\n" in file.read_text()
    run(pytester).assert_outcomes(passed=1)

    for name in ("models.py", "test_it.py"):
        source = pytester.path / name
        renamed = source.read_text().replace("Block", "Layer").replace("UnevenModel", "Network")
        source.write_text(renamed)
    run(pytester).assert_outcomes(passed=1)

    source.write_text(
        renamed.replace(
            "fully_shard(layer, mesh=mesh)",
            "fully_shard(layer, mesh=mesh, reshard_after_forward=layer is model.layers[0])",
        )
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    assert "layers.1: reshard_after_forward True -> False" in result.stdout.str()
    assert "accept: pytest --snapshot-update" in result.stdout.str()


REPLICATED_TEST = """
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

@pytest.mark.distributed
@pytest.mark.parametrize("wrap", [DistributedDataParallel, replicate], ids=["ddp", "replicate"])
def test_tree(wrap, fsdp_tree, comm_snapshot, tmp_path):
    tree = fsdp_tree.of_all_ranks(wrap(UnevenModel(10)))
    assert tree == comm_snapshot
    fsdp_tree.show(tree)
    fsdp_tree.save(tree, tmp_path / "tree.html")
    assert "REPLICATED" in (tmp_path / "tree.html").read_text()
    assert str(tree).startswith("[UnevenModel] REPLICATED")
    assert not tree.findings
"""


def test_replicated_tree_is_drawn_saved_and_compared(project):
    pytester = project(REPLICATED_TEST)
    result = run(pytester, "--snapshot-update", "-s")
    result.assert_outcomes(passed=2)
    assert "REPLICATED world=2, root" in result.stdout.str()
    files = list(pytester.path.glob("snapshots/**/*.comm"))
    assert len(files) == 2
    assert all("unit (root) ddp root replicate=world\n" in file.read_text() for file in files)
    run(pytester).assert_outcomes(passed=2)
    source = pytester.path / "test_it.py"
    written = source.read_text()
    source.write_text(written.replace("(wrap(UnevenModel(10)))", "(fully_shard(UnevenModel(10)))"))
    result = run(pytester)
    result.assert_outcomes(failed=2)
    shown = result.stdout.str()
    assert "(root): sharded by ddp -> fsdp2, replicated over world -> sharded over world" in shown


FINDINGS_TEST = """
@pytest.mark.distributed
def test_tree(fsdp_tree, device_mesh):
    tree = fsdp_tree(shard(UnevenModel(10), device_mesh(), blocks=1))
    assert not tree.findings

class TestOther:
    @pytest.mark.distributed
    def test_it(self, fsdp_tree, device_mesh):
        assert fsdp_tree(shard(UnevenModel(10), device_mesh(), blocks=1)).findings == ()
"""


def test_findings_fail_once_and_can_be_disabled(project, monkeypatch):
    pytester = project(FINDINGS_TEST)
    monkeypatch.setenv("COLUMNS", "80")
    result = run(pytester)
    result.assert_outcomes(failed=2)
    shown = [line for line in result.outlines if line.startswith(("E", "FAILED", "rank"))]
    lines = [line[1:].strip() for line in shown]
    for head in (
        "assert not <1 finding: partly-wrapped in layers.1>",
        "assert <1 finding: partly-wrapped in layers.1> == ()",
    ):
        first = lines.index(head)
        assert lines[first + 1 : first + 5] == [
            "warning partly-wrapped (460 B): layers.1",
            "1 of 2 sibling Block modules are units, but these are not: their",
            "parameters are gathered with an enclosing unit, or not at all",
            "fix: call fully_shard on each block of the stack",
        ]
    # Nothing is left out, nothing is said by each rank.
    assert len(shown) == 2 * 6
    assert all(len(line) <= 80 for line in shown)
    assert not [line for line in shown[:-2] if "..." in line]
    pytester.makeini("[pytest]\nfsdp_comm_findings =\n    partly-wrapped = off\n")
    run(pytester).assert_outcomes(passed=2)
