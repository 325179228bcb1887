"""`comm_mode.counts` and `nbytes`: an impossible name raises instead of returning 0."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard, step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm import RecordingError
from pytest_fsdp_comm.text.fqn import expand
from pytest_fsdp_comm.text.words import show_nbytes

fake = pytest.mark.distributed(world_size=4, backend="fake")
ws2 = pytest.mark.distributed(world_size=2)
KINDS = (
    "expected one of all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, reduce, "
    "gather, scatter, send, recv, barrier"
)
MODULES = (
    "expected one of (root), embed, head, layers, layers.{0..1}, layers.{0..1}.down, "
    "layers.{0..1}.up, (no-module)"
)
IN_MODEL = "in the model passed to comm_mode"
MISTAKES = {
    "a kind": (
        {"kind": "all_gathr"},
        f"there is no kind 'all_gathr'; {KINDS}",
    ),
    "a kind of torch": (
        {"kind": "_allgather_base_"},
        f"there is no kind '_allgather_base_'; {KINDS}",
    ),
    "a kind that is known under its name": (
        {"kind": "unknown:allreduce_"},
        f"there is no kind 'unknown:allreduce_'; {KINDS}",
    ),
    "an operation that torch has not": (
        {"kind": "unknown:all_shuffle"},
        f"there is no kind 'unknown:all_shuffle'; {KINDS}",
    ),
    "what is no collective": (
        {"kind": "reshard"},
        f"there is no kind 'reshard'; {KINDS}; unshard and reshard are not collectives; see "
        "comm_mode.reshards",
    ),
    "a packet": (
        {"kind": torch.ops.c10d.send},
        "kind must be a name, got OpOverloadPacket; expected one of all_gather",
    ),
    "a phase": (
        {"phase": "backwards"},
        "there is no phase 'backwards'; expected one of forward, backward, recompute, optimizer, "
        "outside",
    ),
    "an axis": (
        {"axis": "dpp"},
        "there is no axis 'dpp'; expected one of dp, tp, world",
    ),
    "an owner": (
        {"owner": "layer.0"},
        f"there is no module 'layer.0' {IN_MODEL}; {MODULES}",
    ),
    "a pattern": (
        {"owner": "layer.{0..3}"},
        f"no module matches 'layer.{{0..3}}' {IN_MODEL}; {MODULES}",
    ),
    "a pattern of one segment": (
        {"owner": "layers.*.*.*"},
        f"no module matches 'layers.*.*.*' {IN_MODEL}; {MODULES}",
    ),
    "a broken pattern": (
        {"owner": "layers.{0.3}"},
        "owner: bad numbers {0.3} in 'layers.{0.3}': expected ascending numbers and ranges such as "
        "{0..3,7}",
    ),
    "a module": (
        {"owner": nn.ReLU()},
        "owner must be the name of a module such as 'layers.0', got ReLU; use a name "
        "as written in the snapshot, or '' for the root",
    ),
}


@pytest.fixture
def recorded(device_mesh, comm_mode):
    """A model on one axis of two, after one step."""
    model = shard(Model(), device_mesh(dp=2, tp=2)["dp"])
    with comm_mode(model):
        step(model)
    return comm_mode


@fake
def test_impossible_name_raises_with_possible_names(recorded):
    for asked, text in MISTAKES.values():
        for ask in (recorded.counts, recorded.nbytes):
            with pytest.raises(RecordingError) as caught:
                ask(**asked)
            assert str(caught.value).startswith(text)


def test_axis_without_process_group_raises(comm_mode):
    model = nn.Linear(2, 2)
    with comm_mode(model):
        model(torch.ones(1, 2))
    with pytest.raises(RecordingError, match=r"^there is no axis 'dp'; the recording has none$"):
        comm_mode.counts(axis="dp")
    with pytest.raises(RecordingError, match=r"^axis must be a name, got int; the recording has"):
        comm_mode.counts(axis=3)


@fake
def test_what_there_is_but_sent_nothing_is_zero(recorded):
    assert recorded.counts("broadcast") == 0
    assert recorded.counts(phase="optimizer") == 0
    assert recorded.counts(axis="tp") == recorded.nbytes(axis="world") == 0
    for owner in (
        "embed",
        "layers",
        "layers.1.up",
        "(no-module)",
        "layers.*.*",
        "layers.{1..900}.up",
    ):
        assert recorded.counts(owner=owner) == 0


@fake
def test_patterns_of_snapshots_are_owners(recorded):
    assert recorded.counts(owner="layers.{0..1}") == recorded.counts(owner="layers.*") == 2 * 3
    assert recorded.counts(owner="l*.{1,7..9999999}") == recorded.counts(owner="layers.1") == 3
    assert recorded.counts(owner="(root)") == recorded.counts(owner="") > 0
    assert recorded.counts(owner="*") == 0
    assert recorded.nbytes("all_gather", phase="forward", owner="layers.{0..1}") == 2 * BLOCK_NBYTES
    line = re.compile(r"(\w+) (\S+) (\w+)\[(\w+)\] x(\d+) of ([\d_]+) B float32 \w+(?: ahead 1)?")
    lines = [found.groups() for found in map(line.fullmatch, str(recorded).splitlines()) if found]
    assert len(lines) == 5
    for phase, owner, kind, axis, count, nbytes in lines:
        asked = {"kind": kind, "phase": phase, "owner": owner, "axis": axis}
        assert recorded.counts(**asked) == int(count) * len(expand(owner))
        assert recorded.nbytes(**asked) == int(count) * int(nbytes) * len(expand(owner))


@fake
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, in dynamo
def test_wrappers_in_a_name_change_no_answer(comm_mode, device_mesh):
    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    shard(model, device_mesh())
    with comm_mode(model):
        step(model)
    per_layer = comm_mode.counts(owner="layers.0")
    assert per_layer == comm_mode.counts(owner="layers.1") == 3
    assert comm_mode.counts(owner="layers.0._checkpoint_wrapped_module") == per_layer
    assert {name for name, _ in model.named_modules()} > {"layers.1._orig_mod.up"}
    for name, _ in model.named_modules():
        assert comm_mode.counts(owner=name) >= 0
    with pytest.raises(RecordingError, match=r"there is no module 'layers\._orig_mod\.2'"):
        comm_mode.counts(owner="layers._orig_mod.2")


@fake
def test_unit_of_several_modules_has_joined_name(comm_mode, device_mesh):
    model = Model()
    unused = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.unused = unused
    for unit in ([model.embed, model.head], list(unused), model):
        fully_shard(unit, mesh=device_mesh())
    with comm_mode(model):
        step(model)
    assert comm_mode.counts("all_gather", phase="forward", owner="embed+head") == 1
    assert comm_mode.counts(owner="unused.0+unused.1") == 0
    assert comm_mode.counts(owner="embed") == comm_mode.counts(owner="*") == 0


@fake
def test_a_bare_block_knows_the_modules_that_ran(comm_mode, device_mesh):
    model, other = (shard(Model(), device_mesh()) for _ in range(2))
    with comm_mode:
        step(model)
        step(other)
    assert (
        comm_mode.counts(owner="layers.{0..1}") == comm_mode.counts(owner="@2.layers.{0..1}") == 6
    )
    assert comm_mode.counts(owner="@2.layers.0.up") == 0
    with pytest.raises(RecordingError) as caught:
        comm_mode.counts(owner="h.0")
    assert str(caught.value).startswith(
        "there is no module 'h.0' among the modules that ran; expected one of (root), @2, "
    )
    assert str(caught.value).endswith(
        "; for modules that did not run, use `with comm_mode(model):`"
    )
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RecordingError, match=r"expected one of \(no-module\); for modules"):
        comm_mode.counts(owner="")


@fake
def test_each_group_of_rank_has_one_axis_name(comm_mode, device_mesh):
    kept = init_device_mesh("cpu", (4,), mesh_dim_names=("lonely",))
    ring = dist.new_group([0, 1], group_desc="ring")
    dist.new_group([2, 3], group_desc="not ours")
    with comm_mode:
        dist.all_reduce(torch.ones(1), group=ring)
    assert comm_mode.counts(axis="ring") == 1
    # The default group, which sent nothing, by both of its names.
    assert comm_mode.counts(axis="lonely") == comm_mode.counts(axis="world") == 0
    with pytest.raises(RecordingError, match="no axis 'not ours'; expected one of lonely, ring, w"):
        comm_mode.counts(axis="not ours")
    with comm_mode:
        dist.all_reduce(torch.ones(1), group=kept.get_group())
    assert comm_mode.counts(axis="world") == 1
    with pytest.raises(RecordingError) as caught:
        comm_mode.counts(axis="lonely")
    assert str(caught.value) == (
        "axis 'lonely' is called 'world' in this recording, since both are the same process "
        "group; use axis='world'"
    )
    model = shard(Model(), device_mesh(dp=4))
    with comm_mode(model):
        step(model)
    with pytest.raises(RecordingError, match="axis 'world' is called 'dp' in this recording"):
        comm_mode.counts(axis="world")
    dist.destroy_process_group()
    assert comm_mode.counts(axis="dp") == comm_mode.counts() > 0
    assert comm_mode.counts(axis="ring") == 0
    with pytest.raises(RecordingError, match="no axis 'lonely'; expected one of dp, ring"):
        comm_mode.counts(axis="lonely")


@fake
def test_axis_recorded_under_other_name_raises(comm_mode, device_mesh):
    """As expert parallelism over all ranks, whose group is that of FSDP."""
    model = shard(Model(), device_mesh(dp=4))
    experts = distribute_tensor(torch.ones(4), device_mesh(ep=4), [Shard(0)])
    with comm_mode(model):
        step(model)
        experts.full_tensor()
    assert comm_mode.counts("all_gather", axis="dp") == 5 + 1
    with pytest.raises(RecordingError, match="axis 'ep' is called 'dp' in this recording"):
        comm_mode.counts(axis="ep")
    # Both names are valid as long as nothing was sent.
    with comm_mode(model):
        experts.to_local()
    assert comm_mode.counts(axis="dp") == comm_mode.counts(axis="ep") == 0


@fake
def test_axes_of_units_that_never_ran_are_known(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(), reshard_after_forward=2)
    with comm_mode(model):
        pass
    assert comm_mode.counts(axis="dp") == comm_mode.counts(axis="dp.post_forward") == 0


@fake
def test_group_destroyed_in_block_keeps_its_events(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        step(model)
        dist.destroy_process_group()
    assert comm_mode.counts(owner="layers.0", axis="dp") == 3


@pytest.mark.distributed(world_size=8, backend="fake")
def test_group_destroyed_before_model_ran_is_known(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(dp=4, tp=2)["dp"], reshard_after_forward=2)
    with comm_mode(model):
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    assert comm_mode.counts(owner="layers.0") == comm_mode.counts(axis="dp") == 0
    assert comm_mode.counts(axis="world") == 1


@ws2
def test_each_rank_answers_for_itself(comm_mode, dist_info):
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    with comm_mode(model):
        step(model)
        if dist_info.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
    assert comm_mode.counts("send") == 1 - dist_info.rank
    assert comm_mode.counts("recv") == dist_info.rank
    # The name that the wrapper gives to the module.
    assert comm_mode.counts("all_reduce", owner="module") == comm_mode.counts(
        "all_reduce", owner=""
    )


@fake
def test_query_before_block_raises_after_error_works(comm_mode):
    with pytest.raises(RecordingError, match="no recording yet; run the code in"):
        comm_mode.counts("all_gather")
    model = nn.Linear(1, 1)

    def fails():
        with comm_mode(model):
            dist.all_reduce(torch.ones(1))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert comm_mode.counts("all_reduce", owner="(no-module)", axis="world") == 1


@fake
def test_answers_are_numbers(recorded):
    count = recorded.counts("all_gather")
    assert isinstance(count, int)
    assert torch.zeros(count).shape == (count,)
    assert json.dumps({"count": count}) == f'{{"count": {count}}}'
    assert torch.tensor(count).item() == count


@fake
def test_fixture_repr_is_one_line_str_is_table(recorded, comm_mode):
    assert comm_mode is recorded
    # The root and two blocks are gathered, the blocks again in backward, and all are reduced.
    nbytes = 2 * ROOT_NBYTES + 6 * BLOCK_NBYTES
    assert repr(comm_mode) == f"<CommMode: 8 collectives, {show_nbytes(nbytes)}>"
    assert str(comm_mode) == f"{comm_mode}"
    assert str(comm_mode).startswith("# pytest-fsdp-comm")
    with comm_mode:
        assert repr(comm_mode) == str(comm_mode) == "<CommMode: recording>"
        dist.all_reduce(torch.ones(1))
    assert repr(comm_mode) == "<CommMode: 1 collective, 4 B>"
    with comm_mode:
        pass
    assert repr(comm_mode) == "<CommMode: 0 collectives, 0 B>"
