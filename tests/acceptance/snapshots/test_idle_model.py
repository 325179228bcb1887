"""A comparison fails if the model passed to ``comm_mode`` did not run, but another one did."""

HEAD = """
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ranks = pytest.mark.distributed(world_size=2)
simulated = pytest.mark.distributed(world_size=2, backend="fake")

def layers(count=2):
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))

def sharded(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def step(model):
    model(torch.randn(2, 4)).sum().backward()

class Metric(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x
"""

WRONG = {
    "fsdp2": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = layers()
    wrapped = sharded(copy.deepcopy(model), device_mesh())
    with comm_mode(model):
        step(wrapped)
    assert comm_mode == comm_snapshot
""",
    "backward alone": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = layers()
    loss = sharded(copy.deepcopy(model), device_mesh())(torch.randn(2, 4)).sum()
    with comm_mode(model):
        loss.backward()
    assert comm_mode == comm_snapshot
""",
    "fsdp1": """
@simulated
def test_it(comm_mode, comm_snapshot):
    model = layers()
    wrapped = FullyShardedDataParallel(copy.deepcopy(model), device_id="cpu")
    with comm_mode(model):
        step(wrapped)
    assert comm_mode == comm_snapshot
""",
    "ddp": """
@ranks
def test_it(comm_mode, comm_snapshot):
    model = layers()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    with comm_mode(model):
        step(wrapped)
    assert comm_mode == comm_snapshot
""",
    "tensor parallel": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model, plan = layers(), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    wrapped = parallelize_module(copy.deepcopy(model), device_mesh(tp=2), plan)
    with comm_mode(model), torch.no_grad():
        wrapped(torch.randn(2, 4))
    assert comm_mode == comm_snapshot
""",
    "one of two parts": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    first, second = layers(2), layers(3)[2:]
    second = nn.ModuleDict({"tail": second})
    used = copy.deepcopy(second)
    sharded(first, device_mesh())
    sharded(used["tail"], device_mesh())
    with comm_mode([first, second]):
        step(nn.Sequential(first, used["tail"]))
    assert comm_mode == comm_snapshot
""",
}

RIGHT = {
    "optimizer": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = sharded(layers(), device_mesh())
    step(model)
    with comm_mode(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model[0].weight.full_tensor()
    assert comm_mode == comm_snapshot
""",
    "backward alone": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = sharded(layers(), device_mesh())
    loss = model(torch.randn(2, 4)).sum()
    with comm_mode(model):
        loss.backward()
    assert comm_mode == comm_snapshot
""",
    "ddp": """
@ranks
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_it(comm_mode, comm_snapshot, inner, forward):
    model = layers()
    wrapped = DistributedDataParallel(model)
    loss = wrapped(torch.randn(2, 4)).sum()
    with comm_mode(model if inner else wrapped):
        (wrapped(torch.randn(2, 4)).sum() if forward else loss).backward()
    assert comm_mode == comm_snapshot
""",
    "compiled": """
@simulated
@pytest.mark.parametrize("inner", [True, False])
def test_it(device_mesh, comm_mode, comm_snapshot, inner):
    model = sharded(layers(), device_mesh())
    compiled = torch.compile(model, backend="eager")
    with comm_mode(model if inner else compiled):
        step(compiled)
    assert comm_mode == comm_snapshot
""",
    "runs, and only others send": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = layers()
    with comm_mode(model), torch.no_grad():
        Metric()(model(torch.randn(2, 4)))
    assert comm_mode == comm_snapshot
""",
    "runs after others sent": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = layers()
    with comm_mode(model), torch.no_grad():
        model(Metric()(torch.randn(2, 4)))
    assert comm_mode == comm_snapshot
""",
    "a list of layers, which is never called": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = nn.Sequential(nn.Linear(4, 4), sharded(layers(), device_mesh()))
    inner = nn.ModuleList(model[1])
    with comm_mode(inner), torch.no_grad():
        model(torch.randn(2, 4))
    assert comm_mode == comm_snapshot
""",
    "unsharded by hand": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model = sharded(layers(), device_mesh())
    with comm_mode(model):
        model[0].unshard()
    assert comm_mode == comm_snapshot
""",
    "a stage that gets nothing": """
@ranks
def test_it(dist_info, comm_mode, comm_snapshot):
    stage, x = layers(), torch.randn(2, 4)
    with comm_mode(stage):
        if dist_info.rank == 0:
            dist.send(stage(x), 1)
        else:
            dist.recv(x, 0)
    assert comm_mode == comm_snapshot
""",
    "allowed": """
@simulated
def test_it(device_mesh, comm_mode, comm_snapshot):
    model, other = layers(), sharded(layers(), device_mesh())
    with comm_mode(model):
        step(other)
    assert comm_mode == comm_snapshot(allow_idle_model=True)
""",
}


def sessions(cases):
    """Return one project with a module for each case."""
    return {f"test_{number}": HEAD + source for number, source in enumerate(cases.values())}


def test_idle_model_fails_and_names_running_one(pytester):
    pytester.makepyfile(**sessions(WRONG))
    for arguments in ([], ["--snapshot-update"]):
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        result.assert_outcomes(failed=len(WRONG))
        assert not list(pytester.path.glob("snapshots/**/*.comm"))
    output = result.stdout.str()
    head = "the model passed to comm_mode did not run, so nothing was compared or written:"
    assert output.count(head) == len(WRONG), output
    other = "passed to comm_mode ran, but another model"
    assert (
        f"  no module of the Sequential {other} (for example, a FSDPLinear) issued 6 coll" in output
    )
    assert f"  no module of the Sequential {other} issued 1 collective\n" in output  # of DDP
    assert (
        f"  no module of the ModuleDict {other} (for example, a FSDPLinear) issued 3 coll" in output
    )
    assert (
        "pass the model that runs, after it is wrapped; if this model is not supposed to run, use "
        "comm_snapshot(allow_idle_model=True)"
    ) in output


def test_a_model_that_ran_or_need_not_is_compared(pytester):
    pytester.makepyfile(**sessions(RIGHT))
    result = pytester.runpytest_subprocess("--snapshot-update")
    result.assert_outcomes(passed=len(RIGHT) + 4)
    files = {path.parent.name for path in pytester.path.glob("snapshots/*/*.comm")}
    assert len(files) == len(RIGHT)


def test_idle_model_names_ranks_with_idle_part(pytester):
    pytester.makepyfile(
        HEAD
        + """
@ranks
def test_it(dist_info, comm_mode, comm_snapshot):
    stage, metric = layers(), Metric()
    with comm_mode(stage), torch.no_grad():
        x = stage(torch.randn(2, 4)) if dist_info.rank == 0 else torch.randn(2, 4)
        metric(x)
    assert comm_mode == comm_snapshot
"""
    )
    result = pytester.runpytest_subprocess("--snapshot-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*  no module of the Sequential passed to comm_mode ran, but another model (for "
            "example, a Metric) issued 1 collective (on rank 1)"
        ]
    )
