"""CommDebugMode's methods of CommMode: equal to torch where torch is right, else correct."""

import gc
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Block, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_comm import CommMode, RecordingError

fake = pytest.mark.distributed(world_size=4, backend="fake")
# Of CommDebugMode's hooks, and of FSDP about outputs that it takes for views under them.
ignore_hook_warning = pytest.mark.filterwarnings("ignore::UserWarning")


def build(mesh, blocks, sharded, parallel, reshard):
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for number in sorted(parallel):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model[number % blocks], mesh["tp"], plan)
    for number in sorted(sharded):
        if not isinstance(model[number % blocks], torch.distributed.fsdp.FSDPModule):
            fully_shard(model[number % blocks], mesh=mesh["dp"], reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh["dp"])


@fake
@ignore_hook_warning
def test_totals_are_equal_on_random_models(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    numbers = st.sets(st.integers(0, 3))

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(blocks=st.integers(1, 4), sharded=numbers, parallel=numbers, reshard=st.booleans())
    def check(blocks, sharded, parallel, reshard):
        model = build(mesh, blocks, sharded, {n % blocks for n in parallel}, reshard)
        with comm_mode(model):
            step(model)
        theirs = CommDebugMode()
        with theirs:
            step(model)
        assert comm_mode.get_total_counts() == theirs.get_total_counts()
        assert comm_mode.get_comm_counts() == dict(theirs.get_comm_counts())

    check()


@fake
@ignore_hook_warning
def test_prefetch_misleads_only_torchs_module_counts(comm_mode, device_mesh):
    model = build(device_mesh(dp=2, tp=2), 3, {0, 1, 2}, set(), reshard=True)
    gather = torch.ops.c10d._allgather_base_
    with comm_mode(model):
        step(model)
    ours = comm_mode.get_comm_module_counts()
    # Each block gathers its own parameters once in backward.
    for number in range(3):
        assert ours[f"FSDPSequential.{number}"]["backward"][gather] == 1
    assert ours["FSDPSequential"]["backward"][gather] == 3
    assert ours["Global"]["forward"] == {gather: 3}
    theirs = CommDebugMode()
    with theirs:
        step(model)
    counts = theirs.comm_module_counts
    # Block 1 prefetched block 0, and torch attributes the gather to block 1.
    first = counts["FSDPSequential.0"]["backward"] if "FSDPSequential.0" in counts else {}
    assert first.get(gather, 0) == 0


@pytest.mark.distributed(world_size=2)
def test_torch_omits_barriers_and_point_to_point(comm_mode, dist_info):
    theirs = CommDebugMode()
    for mode in (comm_mode, theirs):
        with mode:
            dist.barrier()
            if dist_info.rank == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
    assert comm_mode.get_total_counts() == 2
    assert theirs.get_total_counts() == 0


def tensor_parallel(model, mesh, *prefixes):
    plan = {}
    for prefix in prefixes:
        plan |= {f"{prefix}up": ColwiseParallel(), f"{prefix}down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@pytest.fixture
def comm_mode():
    """The class in place of CommDebugMode, which traces operations, as the fixture does not."""
    return CommMode()


def under_both(comm_mode, run):
    """Both modes after the same code, which ran once before, so that torch has filled its caches.

    Their blocks are empty in the end but for what `run` does.
    """
    run()
    theirs = CommDebugMode()
    for mode in (comm_mode, theirs):
        with mode:
            run()
    return theirs


def without_empty_titles(table):
    """Torch also writes PASS where all operations are left out, such as views of its hooks."""
    lines = table.splitlines()
    follows = [*lines[1:], ""]
    return [
        line
        for line, after in zip(lines, follows, strict=True)
        if not line.endswith(" PASS") or after.lstrip().startswith("*")
    ]


@fake
@ignore_hook_warning
def test_attributes_and_noise_levels_match_torch(comm_mode, device_mesh, tmp_path):
    class Feed(nn.Module):
        def __init__(self):
            super().__init__()
            first, last = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8)
            self.layers = nn.ModuleList([first, last])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    plan = {"layers.0.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    model = parallelize_module(Feed(), device_mesh(tp=4), plan)
    x = torch.ones(2, 8)
    theirs = under_both(comm_mode, lambda: model(x))
    assert comm_mode.comm_counts == theirs.comm_counts
    assert comm_mode.comm_module_counts == theirs.comm_module_counts
    assert comm_mode.get_sharding_info() == theirs.get_sharding_info()
    assert list(comm_mode.get_parameter_info()) == list(theirs.get_parameter_info())
    assert list(theirs.get_sharding_info())  # otherwise equality would prove nothing
    ours, torchs = comm_mode.advanced_module_tracker, theirs.advanced_module_tracker
    for name in ("module_helper_dict", "module_parents_dict", "parent_dict", "sharding_dict"):
        assert getattr(ours, name) == getattr(torchs, name), name
    assert list(ours.module_parameters_dict) == list(torchs.module_parameters_dict)
    tables, dumps = [], []
    for level in range(3):
        for mode in (comm_mode, theirs):
            mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=level)
            mode.generate_json_dump(str(tmp_path / "log.json"), noise_level=level)
            tables.append(without_empty_titles((tmp_path / "log.txt").read_text()))
            dumps.append(json.loads((tmp_path / "log.json").read_text()))
        assert tables[-2] == tables[-1], level
        assert dumps[-2] == dumps[-1], level
    for mode in (comm_mode, theirs):
        colored = mode.generate_comm_debug_tracing_table(0)
        assert "\n\033[1;33m    *c10d_functional.all_reduce: 1\033[0m\n" in colored
        assert "\033[1;31m" not in colored
    assert len(set(map(tuple, tables))) == 3
    # torch's hooks take views, which torch then lists.
    assert "**aten.view.default" in comm_mode.generate_comm_debug_tracing_table()
    assert "**aten.view.default" not in "".join(tables[-1])


@fake
@ignore_hook_warning
def test_backward_and_recomputation_match_torch(comm_mode, device_mesh):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=True)

    model = tensor_parallel(Checkpointed(), device_mesh(tp=4), "block.")
    x = torch.ones(2, 8, requires_grad=True)
    theirs = under_both(comm_mode, lambda: model(x).sum().backward())
    assert comm_mode.comm_module_counts["Global"] == theirs.comm_module_counts["Global"]
    sent = torch.ops.c10d_functional.all_reduce
    # One each in forward, in the forward that runs again, and for the gradient of the input.
    assert comm_mode.comm_module_counts["Checkpointed.block"] == {
        "forward": {sent: 1},
        "backward": {sent: 2},
    }
    table = comm_mode.generate_comm_debug_tracing_table(1)
    again = table[table.index("ACTIVATION CHECKPOINTING") :]
    assert "**aten.mm.default" in again
    listed = comm_mode.comm_module_operation_counts["Checkpointed.block.up"]["operations_list"]
    matmuls = [
        (entry["is_bw"], entry["is_activation_checkpointing"])
        for entry in listed
        if entry["name"] == torch.ops.aten.mm.default and entry["input_shape"]
    ]
    # Forward, its repetition, and the gradients of weight and input.
    assert sorted(matmuls) == [(False, False), (True, False), (True, False), (True, True)]


@fake
def test_counts_of_absent_operations_and_modules(comm_mode, device_mesh):
    model = build(device_mesh(dp=2, tp=2), 1, {0}, set(), reshard=True)
    with comm_mode:
        step(model)
    absent = torch.ops.c10d.barrier
    assert comm_mode.get_comm_counts()[absent] == 0
    assert comm_mode.comm_counts[absent] == 0
    assert comm_mode.comm_module_counts["FSDPSequential.0"]["forward"][absent] == 0
    # Results are copies: looking up an absent key adds nothing.
    assert absent not in comm_mode.get_comm_counts()
    with pytest.raises(KeyError):
        comm_mode.comm_module_counts["FSDPSequential.0.up"]


@fake
def test_results_in_block_are_so_far_and_restart(comm_mode, device_mesh):
    mesh = device_mesh(tp=4)
    first, second = (tensor_parallel(Block(), mesh, "") for _ in range(2))
    second = nn.Sequential(second)
    sent = torch.ops.c10d_functional.all_reduce
    with comm_mode:
        first(torch.ones(2, 8))
        assert comm_mode.get_comm_counts()[sent] == comm_mode.counts("all_reduce") == 1
        assert [event.owner for event in comm_mode.events] == ["down"]
        first(torch.ones(2, 8))
        assert comm_mode.get_total_counts() == 2
        assert repr(comm_mode) == "<CommMode: recording>"
        with pytest.raises(RecordingError, match="inside the block"):
            comm_mode.merged_profile()
    assert comm_mode.get_total_counts() == 2
    assert list(comm_mode.get_parameter_info()) == ["Block.up", "Block.down"]
    with comm_mode:
        assert comm_mode.get_total_counts() == 0
        assert comm_mode.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
        assert comm_mode.get_parameter_info() == comm_mode.get_sharding_info() == {}
        second(torch.ones(2, 8))
        assert list(comm_mode.get_parameter_info()) == ["Sequential.0.up", "Sequential.0.down"]
    placed = comm_mode.get_sharding_info()
    assert list(placed) == ["Sequential.0.up.weight", "Sequential.0.down.weight"]


@fake
def test_asking_in_the_block_changes_nothing_in_it(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    one, other = (build(mesh, 1, {0}, {0}, reshard=True) for _ in range(2))
    loss = one(torch.ones(2, 8)).sum()

    def run(ask):
        with comm_mode:
            loss.backward(retain_graph=True)
            ask()
            step(other)
        return [(event.owner, event.axis) for event in comm_mode.events]

    # The first model acts only in backward, so it gets its name at the end or in a query.
    unasked = run(lambda: None)
    assert run(lambda: comm_mode.counts("all_gather")) == unasked
    assert {owner.partition(".")[0] for owner, _ in unasked} > {"@2"}


@fake
@pytest.mark.parametrize(
    "ask",
    [
        lambda mode, _: mode.get_parameter_info(),
        lambda mode, _: mode.get_sharding_info(),
        lambda mode, _: mode.comm_module_operation_counts,
        lambda mode, _: mode.advanced_module_tracker,
        lambda mode, _: mode.generate_comm_debug_tracing_table(noise_level=0),
        lambda mode, path: mode.generate_json_dump(str(path), noise_level=3),
    ],
    ids=["parameters", "sharding", "operations", "tracker", "table", "json"],
)
def test_query_in_block_is_not_recorded(comm_mode, device_mesh, tmp_path, ask):
    model = build(device_mesh(dp=2, tp=2), 2, {0}, {1}, reshard=True)

    def run(ask):
        with comm_mode:
            step(model)
            ask()
        return comm_mode.generate_comm_debug_tracing_table(noise_level=3)

    run(lambda: None)
    unasked = run(lambda: None)
    assert "aten.detach" in unasked
    assert run(lambda: ask(comm_mode, tmp_path / "dump.json")) == unasked


@fake
def test_several_models_are_named_by_their_class(comm_mode, device_mesh):
    mesh = device_mesh(tp=4)
    block, pair = tensor_parallel(Block(), mesh, ""), nn.Sequential(Block())
    tensor_parallel(pair, mesh, "0.")
    for entered in (comm_mode, comm_mode([block, pair])):
        with entered:
            block(torch.ones(2, 8))
            pair(torch.ones(2, 8))
        named = ["Global", "Block", "Block.down", "Sequential", "Sequential.0", "Sequential.0.down"]
        assert list(comm_mode.comm_module_counts) == named


@fake
@ignore_hook_warning
def test_backward_only_block_works_where_torch_fails(comm_mode, device_mesh):
    model = tensor_parallel(Block(), device_mesh(tp=4), "")
    x = torch.ones(2, 8, requires_grad=True)
    with comm_mode:
        loss = model(x).sum()
    with comm_mode:
        loss.backward()
    sent = torch.ops.c10d_functional.all_reduce
    assert comm_mode.comm_module_counts["Block.up"]["backward"] == {sent: 1}
    table = comm_mode.generate_comm_debug_tracing_table(0)
    assert "Block.up" in table
    assert "*c10d_functional.all_reduce: 1" in table
    assert comm_mode.get_parameter_info() == {}


@fake
@ignore_hook_warning
def test_gathered_parameters_show_sharded_and_die(comm_mode, device_mesh):
    model = build(device_mesh(dp=2, tp=2), 1, {0}, set(), reshard=True)
    with comm_mode(model):
        step(model)
    sharding = {
        "FSDPSequential.0.up.weight": "(Shard(dim=0),)",
        "FSDPSequential.0.down.weight": "(Shard(dim=0),)",
    }
    shown = {key: str(value) for key, value in comm_mode.get_sharding_info().items()}
    assert shown == sharding
    parameters = comm_mode.get_parameter_info()["FSDPSequential.0.up"]
    assert parameters["weight"].to_local().shape == (4, 8)
    del model, parameters
    gc.collect()
    with pytest.raises(RecordingError, match="recorded model no longer exists"):
        comm_mode.get_parameter_info()
    shown = {key: str(value) for key, value in comm_mode.get_sharding_info().items()}
    assert shown == sharding
    assert " *weight: (Shard(dim=0),)\n" in comm_mode.generate_comm_debug_tracing_table(1)


def test_without_ranks_counts_are_zero_compare_raises(comm_mode):
    with pytest.raises(RecordingError, match="no recording yet; run the code in"):
        comm_mode.get_total_counts()
    with comm_mode:
        nn.Linear(1, 1)(torch.ones(1))
    assert comm_mode.get_total_counts() == comm_mode.counts("all_gather") == 0
    assert comm_mode.get_comm_counts() == {}
    with pytest.raises(RecordingError, match=r"without a process group.*@pytest.mark.distributed"):
        comm_mode.merged_profile()


def test_misuse_without_ranks_is_an_error(comm_mode):
    with pytest.raises(RecordingError, match="or a list of them, got str; pass the model"):
        comm_mode("model")
    with pytest.raises(RecordingError, match=r"got a dict; pass torch\.nn\.ModuleDict\(\.\.\.\)"):
        comm_mode({"actor": nn.Linear(1, 1)})
