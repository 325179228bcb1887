"""DTensor: redistributions of every sort, on one, two and three mesh axes."""

from types import SimpleNamespace

import pytest
import torch
from models import ACTIVATION_NBYTES, BLOCK_NBYTES, FLOAT, ROOT_NBYTES, WIDTH, Model, shard, step
from oracle import gloo_and_fake, lines, witnessed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_facts import SUMS_NORMS_AT_EACH_USE

from pytest_fsdp_comm.recording.dtensors import RedistributionWatch
from pytest_fsdp_comm.recording.mesh_axes import GroupNames

TENSOR = WIDTH * WIDTH * FLOAT


def moves(comm_mode):
    """``phase owner source -> target`` of each redistribution; ``!`` where user code asked."""

    def shown(placements):
        return ",".join(placements)

    return [
        f"{move.phase.value} {'-' if move.owner is None else move.owner or '.'} "
        f"{shown(move.source_placements)} -> {shown(move.target_placements)}"
        f"{' !' if move.is_explicit else ''}"
        for move in comm_mode.redistributions
    ]


@pytest.mark.upstream
@gloo_and_fake(2)
# torch warns that gloo has no all-to-all.
@pytest.mark.filterwarnings("ignore:.*alltoall")
def test_explicit_redistribution_has_its_collective(comm_mode, device_mesh):
    mesh = device_mesh(tp=2)
    whole = torch.ones(WIDTH, WIDTH, requires_grad=True)
    rows = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()

    def redistribute():
        columns = rows.redistribute(mesh, [Shard(1)])
        columns.redistribute(mesh, [Replicate()]).sum().backward()

    witnessed(comm_mode, None, redistribute)
    # Gloo has no all-to-all: each rank gathers all and keeps its part.
    assert lines(comm_mode) == [
        f"outside - all_gather[tp] {TENSOR} < -",
        f"outside - all_gather[tp] {TENSOR} < -",
        f"backward - all_gather[tp] {TENSOR} < -",
    ]
    assert moves(comm_mode) == [
        "outside - Shard(dim=0) -> Shard(dim=1) !",
        "outside - Shard(dim=1) -> Replicate() !",
        "backward - Shard(dim=1) -> Shard(dim=0)",
    ]
    assert {move.nbytes for move in comm_mode.redistributions} == {TENSOR // 2}


@pytest.mark.upstream
@gloo_and_fake(2)
def test_an_operator_redistributes_implicitly(comm_mode, device_mesh):
    mesh = device_mesh(tp=2)
    rows = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(1)])
    witnessed(comm_mode, None, lambda: rows + columns)
    assert [event.source.value for event in comm_mode.events] == ["dtensor"]
    assert len(comm_mode.redistributions) == 1
    assert comm_mode.redistributions[0].is_explicit is False


@gloo_and_fake(2)
def test_partial_is_all_reduced_or_reduce_scattered(comm_mode, device_mesh):
    mesh = device_mesh(tp=2)
    columns = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(1)])
    rows = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(0)])

    def multiply():
        partial = columns @ rows
        assert partial.placements == (Partial(),)
        partial.redistribute(mesh, [Replicate()])
        partial.redistribute(mesh, [Shard(0)])

    witnessed(comm_mode, None, multiply)
    assert lines(comm_mode) == [
        f"outside - all_reduce[tp] {TENSOR} < -",
        f"outside - reduce_scatter[tp] {TENSOR} < -",
    ]


@gloo_and_fake(4)
def test_a_gather_over_two_axes_is_one_redistribution(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    sharded = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(0), Shard(1)])
    witnessed(comm_mode, None, sharded.full_tensor)
    assert [(e.kind, e.axis, e.nbytes) for e in comm_mode.events] == [
        ("all_gather", "tp", TENSOR // 2),
        ("all_gather", "dp", TENSOR),
    ]
    # One redistribution, of two steps.
    assert len(comm_mode.redistributions) == 1
    assert comm_mode.redistributions[0].mesh_axes == ("dp", "tp")


@pytest.mark.distributed(world_size=2, backend="fake")
def test_redistributions_with_reused_frame_are_two(device_mesh):
    placed = SimpleNamespace(mesh=device_mesh(), placements=(Replicate(),))
    watch = RedistributionWatch(GroupNames())

    def reach(steps, number):
        locals_ = {  # of a frame, of which the second is where the first was
            "current_spec": placed,
            "target_spec": placed,
            "local_tensor": torch.ones(1),
            "transform_infos": steps,
            "transform_info": steps[number],
        }
        return watch.describe_new_redistribution(locals_) is not None

    first, second = [object()], [object(), object()]
    assert reach(first, 0)
    # Its first step sends nothing.
    assert reach(second, 1)
    assert reach(second, 0)
    assert not reach(second, 1)


@gloo_and_fake(8)
def test_each_collective_on_three_axes_names_its_own(comm_mode, device_mesh):
    mesh = device_mesh(replicate=2, shard=2, tp=2)
    model = Model()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh["replicate", "shard"])
    witnessed(comm_mode, model, lambda: step(model))
    half = BLOCK_NBYTES // 2
    rows = {
        (row.phase.value, row.owner, row.what, row.axis): (row.count, row.nbytes)
        for row in comm_mode.profile.collectives
    }
    expected = {
        ("forward", "", "all_gather", "shard"): (1, ROOT_NBYTES),
        ("backward", "", "reduce_scatter", "shard"): (1, ROOT_NBYTES),
        ("backward", "", "all_reduce", "replicate"): (1, ROOT_NBYTES // 2),
    }
    for n in range(2):
        unit = f"layers.{n}"
        expected |= {
            ("forward", unit, "all_gather", "shard"): (1, half),
            ("forward", f"{unit}.down", "all_reduce", "tp"): (1, ACTIVATION_NBYTES),
            ("backward", unit, "all_gather", "shard"): (1, half),
            ("backward", f"{unit}.up", "all_reduce", "tp"): (1, ACTIVATION_NBYTES),
            ("backward", unit, "reduce_scatter", "shard"): (1, half),
            ("backward", unit, "all_reduce", "replicate"): (1, half // 2),
        }
    assert rows == expected


@pytest.mark.upstream
@gloo_and_fake(2)
def test_sequence_parallel_gathers_and_scatters(comm_mode, device_mesh):
    model = nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, WIDTH, bias=False),
    )
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, device_mesh(tp=2), plan)
    # Each rank has as many tokens; together they are twice that.
    witnessed(comm_mode, model, lambda: model(torch.randn(1, WIDTH // 2, WIDTH)).sum().backward())
    forward = [line for line in lines(comm_mode) if line.startswith("forward")]
    assert forward == [
        f"forward 1 all_gather[tp] {TENSOR} < 1",
        f"forward 2 reduce_scatter[tp] {TENSOR} < 2",
    ]
    backward = [line for line in lines(comm_mode) if line.startswith("backward")]
    assert backward == [
        f"backward 2 all_gather[tp] {TENSOR} < 2",
        f"backward 1 reduce_scatter[tp] {TENSOR} < 1",
    ]


@gloo_and_fake(4)
def test_fsdp_redistributes_partial_gradients(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    norm = nn.LayerNorm(WIDTH, bias=False)
    parallelize_module(norm, mesh["tp"], SequenceParallel())
    model = fully_shard(norm, mesh=mesh["dp"])
    witnessed(comm_mode, model, lambda: model(torch.randn(1, 2, WIDTH)).sum().backward())
    assert [line for line in lines(comm_mode) if "[tp]" in line] == [
        f"backward . all_reduce[tp] {WIDTH * FLOAT} < ."
    ]
    assert moves(comm_mode) == ["backward . Partial(sum) -> Replicate() !"]


@gloo_and_fake(2)
def test_module_preparing_its_input_owns_gather(comm_mode, device_mesh):
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    plan = {
        "0": PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    }
    parallelize_module(model, device_mesh(tp=2), plan)
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode)[0] == f"forward 0 all_gather[tp] {2 * ACTIVATION_NBYTES} < 0"


@gloo_and_fake(2)
def test_loss_parallel_never_sends_the_logits(comm_mode, device_mesh):
    classes = 16
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes))
    plan = {"1": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, device_mesh(tp=2), plan)

    def loss():
        with loss_parallel():
            nn.functional.cross_entropy(
                model(torch.randn(2, WIDTH)), torch.zeros(2).long()
            ).backward()

    witnessed(comm_mode, model, loss)
    # The largest logit, the sum of exponentials, and the loss, of each of two rows; never the
    # logits. The loss is computed outside every module.
    assert lines(comm_mode) == [
        *["outside - all_reduce[tp] 8 < -"] * 3,
        f"backward 1 all_reduce[tp] {ACTIVATION_NBYTES} < 1",
    ]


@pytest.mark.upstream
@gloo_and_fake(2)
def test_clipping_sends_the_norms_of_dtensors_together(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    step(model)

    def clip_and_step():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm.full_tensor()
        optimizer.step()

    witnessed(comm_mode, model, clip_and_step)
    if SUMS_NORMS_AT_EACH_USE:  # the total, by clipping and by the test
        total = f"all_reduce[dp] {FLOAT} < -"
        assert lines(comm_mode) == [f"optimizer - {total}", f"outside - {total}"]
    else:  # the norms of the six matrices, together
        assert lines(comm_mode) == [f"optimizer - all_reduce[dp] {6 * FLOAT} < -"]


@pytest.mark.distributed(world_size=2)
def test_context_parallel_passes_keys_around_ring(comm_mode, device_mesh):
    # Its attention has no kernel on the host (NotImplementedError in torch 2.13); what gloo can is
    # to shard the buffers, to put them together again, and to pass keys around the ring.
    from torch.distributed._functional_collectives import permute_tensor
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = device_mesh(cp=2)

    class Ring(nn.Module):
        def forward(self, keys):
            received = permute_tensor(keys.flatten(), [1, 0], mesh.get_group())
            return keys + received.view_as(keys)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Ring())

    def attend():
        x = torch.randn(1, WIDTH, WIDTH)
        with torch.no_grad(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            context_parallel_unshard(mesh, [model(x)], [1])

    witnessed(comm_mode, model, attend)
    assert lines(comm_mode) == [
        # A mesh over all ranks is the default group, until something names the mesh.
        f"forward 1 all_to_all[world] {TENSOR // 2} < 1",
        f"outside - all_gather[world] {TENSOR} < -",
    ]
