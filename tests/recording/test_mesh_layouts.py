"""How the groups of an axis lie among the ranks; the numbers are read off the mesh by hand."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings
from pytest_fsdp_comm.comm.mesh import dims_of
from pytest_fsdp_comm.errors import RecordingError


def layouts(comm_mode):
    return {axis.name: axis.dims or axis.groups for axis in comm_mode.recording.mesh_axes}


def send_over(mesh):
    for dim in range(mesh.ndim):
        dist.all_reduce(torch.ones(1), group=mesh.get_group(dim))


@pytest.mark.distributed(world_size=16, backend="fake", ranks=[0, 6, 15])
def test_axes_of_meshes_lie_as_their_groups_do(comm_mode, device_mesh):
    mesh = device_mesh(pp=2, dp=2, tp=4)
    flat = mesh["pp", "tp"]._flatten("pp_tp")
    transposed = DeviceMesh("cpu", torch.arange(16).view(4, 4).t(), mesh_dim_names=("row", "col"))
    with comm_mode:
        send_over(mesh)
        send_over(flat)
        send_over(transposed)
        dist.all_reduce(torch.ones(1))
    assert layouts(comm_mode) == {
        "pp": ((2, 8),),
        "dp": ((2, 4),),
        "tp": ((4, 1),),
        "pp_tp": ((4, 1), (2, 8)),
        "row": ((4, 1),),
        "col": ((4, 4),),
        "world": ((16, 1),),
    }
    assert load_recordings(dump_recordings([comm_mode.recording]))[0] == comm_mode.recording


@pytest.mark.distributed(world_size=8, backend="fake")
def test_groups_without_a_mesh_have_a_layout_too(comm_mode):
    groups = [dist.new_group(ranks) for ranks in ([0, 3, 5, 6], [0, 1, 5], [0, 4], [0, 2], [0])]
    with comm_mode:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    assert layouts(comm_mode) == {
        "size4": ((0, 3, 5, 6),),
        "size3": ((0, 1, 5),),
        "size2.stride4": ((2, 4),),
        "size2.stride2": ((2, 2),),
        "size1": (),
    }


@pytest.mark.distributed(world_size=8, backend="fake")
def test_two_groups_of_one_name_are_distinguished(comm_mode):
    groups = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [0, 4], [0, 1])]
    with comm_mode:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        # Created, but unused.
        dist.new_group([0, 2])
    assert layouts(comm_mode) == {"tp.size2.stride1": ((2, 1),), "tp.size2.stride4": ((2, 4),)}
    assert comm_mode.counts(axis="tp.size2.stride1") == 2
    # It is no longer the name of any group that was used.
    with pytest.raises(RecordingError, match=r"there is no axis 'tp'; expected one of .*stride1"):
        comm_mode.counts(axis="tp")


@pytest.mark.distributed(world_size=8, backend="fake")
def test_irregular_groups_of_one_name_get_rank_suffix(comm_mode):
    groups = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1, 3], [0, 1, 4])]
    with comm_mode:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    assert layouts(comm_mode) == {"tp.ranks0-1,3": ((0, 1, 3),), "tp.ranks0-1,4": ((0, 1, 4),)}


@pytest.mark.distributed(world_size=8, backend="fake")
def test_groups_of_one_name_and_layout_stay_one_axis(comm_mode):
    groups = [dist.new_group([0, 1], group_desc="tp") for _ in range(2)]
    with comm_mode:
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    assert layouts(comm_mode) == {"tp": ((2, 1),)}
    assert comm_mode.counts(axis="tp") == 2


SHAPES = [
    *itertools.product([(2, 1), (4, 1), (3, 2)], [(2, 16), (3, 20)], [(2, 64), (5, 100)]),
    ((2, 8), (4, 1)),
    ((2, 4), (3, 1)),
    ((7, 3),),
    (),
]


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("first", [0, 5])
def test_dims_give_the_ranks_again(dims, first):
    ranks = [first]
    for size, stride in dims:
        ranks = [rank + n * stride for n in range(size) for rank in ranks]
    assert dims_of(ranks) == dims


@pytest.mark.parametrize(
    "ranks", [(0, 3, 5, 6), (0, 1, 3), (0, 1, 4), (0, 1, 4, 6), (0, 1, 2, 4, 5), (0, 1, 4, 5, 8)]
)
def test_irregular_ranks_have_no_dims(ranks):
    assert dims_of(ranks) is None


def group_counts(comm_mode):
    return {axis.name: axis.num_groups for axis in comm_mode.recording.mesh_axes}


@pytest.mark.distributed(world_size=8, backend="fake")
@pytest.mark.parametrize("count", [1, 3])
def test_groups_of_an_axis_are_counted(comm_mode, device_mesh, count):
    meshes = [device_mesh(dp=2, tp=4) for _ in range(count)]
    device_mesh(dp=2, tp=4)  # no collective uses its groups
    # Different ranks, but the same shape, and so the same name.
    shapes = [dist.new_group(ranks) for ranks in ([0, 1], [0, 1], [1, 2])]
    with comm_mode:
        for mesh in meshes:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
            dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
        dist.all_reduce(torch.ones(1), group=meshes[0]["tp"].get_group())
        for group in shapes[:count]:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(torch.ones(1), group=group)
    few = min(count, 2)
    assert group_counts(comm_mode) == {"dp": count, "tp": 1, "size2.stride1": few}


@pytest.mark.distributed(world_size=4, backend="fake")
def test_post_forward_groups_are_not_counted(comm_mode, device_mesh):
    """FSDP2 itself creates one for each unit, so their number follows the number of units."""
    mesh = device_mesh(dp=4)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    with comm_mode(fully_shard(model, mesh=mesh)):
        model(torch.ones(2, 4)).sum().backward()
    assert group_counts(comm_mode) == {"dp": 1, "dp.post_forward": 1}
