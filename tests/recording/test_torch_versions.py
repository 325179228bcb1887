"""Differences between versions of torch: each row of docs/torch-versions.md, on this torch."""

import pytest
import torch
import torch.distributed as dist
from derived import REDUCES_IN_OWN_TYPE
from models import WIDTH, Block, Model, step
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

OWN = "float32" if REDUCES_IN_OWN_TYPE else "bfloat16"
HALF = torch.bfloat16


def reduced(comm_mode):
    """The dtypes of collectives that carry gradients, by kind and axis."""
    return {
        f"{event.kind}[{event.axis}]": event.dtype
        for event in comm_mode.events
        if event.role == "gradients"
    }


def reductions_of(comm_mode, mesh, model=None, **dtypes):
    model, policy = model or Model(), MixedPrecisionPolicy(param_dtype=HALF, **dtypes)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with comm_mode(model):
        step(model)
    return reduced(comm_mode)


@pytest.mark.distributed(world_size=2)
def test_fsdp2_reduces_in_parameter_dtype_since_2_15(comm_mode, device_mesh):
    mesh = device_mesh()
    assert reductions_of(comm_mode, mesh) == {"reduce_scatter[dp]": OWN}
    for dtype in (torch.float32, HALF):
        expected = {"reduce_scatter[dp]": str(dtype).removeprefix("torch.")}
        assert reductions_of(comm_mode, mesh, reduce_dtype=dtype) == expected
    # Parameters that are kept in bfloat16 are reduced in it.
    assert reductions_of(comm_mode, mesh, Model().to(HALF)) == {"reduce_scatter[dp]": "bfloat16"}


@pytest.mark.distributed(world_size=4)
def test_hsdp_reduces_in_parameter_dtype_since_2_15(comm_mode, device_mesh):
    try:
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG)
    except RuntimeError as error:  # torch 2.7
        pytest.skip(str(error))
    found = reductions_of(comm_mode, device_mesh(replicate=2, shard=2))
    assert found == {"reduce_scatter[shard]": OWN, "all_reduce[replicate]": OWN}


@pytest.mark.distributed(world_size=2)
def test_fsdp1_reduces_in_param_dtype(comm_mode):
    policy = MixedPrecision(param_dtype=HALF)
    model = FullyShardedDataParallel(Model(), mixed_precision=policy, device_id=torch.device("cpu"))
    with comm_mode(model):
        step(model)
    assert reduced(comm_mode) == {"reduce_scatter[world]": "bfloat16"}


# torch's, of the view that the last layer gives.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize(
    ("reduce_dtype", "partial"), [(None, OWN), (torch.float32, OWN), (HALF, "bfloat16")]
)
def test_partial_gradients_are_cast_first_since_2_15(comm_mode, device_mesh, reduce_dtype, partial):
    mesh = device_mesh(dp=2, tp=2)
    model = Block(bias=True, norm=True)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=reduce_dtype)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    with comm_mode(model):
        model(torch.ones(2, 4, WIDTH)).sum().backward()
    assert reduced(comm_mode)["all_reduce[tp]"] == partial


@pytest.mark.distributed(world_size=2)
def test_pipeline_may_have_group_per_edge_since_2_15(comm_mode, device_mesh, dist_info):
    config = pytest.importorskip("torch.distributed.config")
    if not hasattr(config, "pipeline_per_edge_p2p"):
        pytest.skip("new in torch 2.15")
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def axes():
        stage = PipelineStage(
            nn.Linear(4, 4), dist_info.rank, 2, torch.device("cpu"), group=mesh.get_group()
        )
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out - target).sum())

        def run():
            values = {"target": torch.ones(4, 4)} if dist_info.rank else {}
            schedule.step(*([] if dist_info.rank else [torch.ones(4, 4)]), **values)

        run()
        with comm_mode:
            run()
        return {(event.kind, event.axis) for event in comm_mode.events}

    mesh = device_mesh(pp=2)
    assert axes() == {("send", "world"), ("recv", "world")}
    with config.patch(pipeline_per_edge_p2p=True):
        there, back = "pp_p2p_round_0", "pp_p2p_round_1"
        sends = (there, back) if dist_info.rank == 0 else (back, there)
        assert axes() == {("send", sends[0]), ("recv", sends[1])}
