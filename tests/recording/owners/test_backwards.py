"""Which backward passes reduce gradients, among those that compute them."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from oracle import gloo_and_fake
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_facts import needs_pipelines_on_gloo, needs_replicas_of_fsdp2

REDUCED_IN = {
    frozenset({3}): "the last of 4 backwards",
    frozenset({0}): "the first of 4 backwards",
    frozenset({1, 3}): "2 of 4 backwards",
    frozenset({0, 1}): "2 of 4 backwards but not the last",
    frozenset(range(4)): "",
}


def words(comm_mode, kind=None):
    """The word of each owner that reduces gradients."""
    rows = [row for row in comm_mode.profile.rows if kind in {None, row.what}]
    held = [(row.owner, call) for row in rows for call in row.calls if call.role == "gradients"]
    return {owner: call.backwards for owner, call in held}


def layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def shard(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(model, **options):
    model(torch.randn(2, WIDTH), **options).sum().backward()


def of_fsdp2(mesh):
    model = shard(layers(), mesh())
    return model, model.set_requires_gradient_sync


def of_wrapper(make):
    def build(_):
        model = make(layers())
        return model, lambda reduces: nullcontext() if reduces else model.no_sync()

    return build


def by_hand(_):
    return layers(), None


@gloo_and_fake(2)
@pytest.mark.parametrize(
    "build",
    [
        of_fsdp2,
        of_wrapper(DistributedDataParallel),
        of_wrapper(lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))),
        by_hand,
    ],
    ids=["fsdp2", "ddp", "fsdp1", "by hand"],
)
def test_row_says_which_backwards_reduce(request, comm_mode, device_mesh, build):
    if "ddp-fake" in request.node.name:
        pytest.skip("DDP does not run on the fake group")
    found = {}
    for reduced_in in REDUCED_IN:
        model, set_reduces = build(device_mesh)
        with comm_mode(model):
            for number in range(4):
                reduces = number in reduced_in
                with (set_reduces and set_reduces(reduces)) or nullcontext():
                    run(model)
                if set_reduces is None and reduces:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
        (found[reduced_in],) = set(words(comm_mode).values())
    assert found == REDUCED_IN


@needs_replicas_of_fsdp2
@pytest.mark.distributed(world_size=2)
def test_replicas_reduce_less_often_than_shards(comm_mode, device_mesh):
    model = shard(layers(), device_mesh(replicate=2, shard=1))
    with comm_mode(model):
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            run(model)
    assert set(words(comm_mode, "all_reduce").values()) == {"the last of 2 backwards"}
    assert set(words(comm_mode, "reduce_scatter").values()) <= {""}


class Gan(nn.Module):
    def __init__(self, replicate):
        super().__init__()
        self.maker, self.judge = replicate(layers()), replicate(layers())

    def forward(self, x, *, makes):
        return self.judge(self.maker(x) if makes else x)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("kind", ["one root", "two roots", "ddp", "by hand"])
def test_backwards_of_other_modules_do_not_count(comm_mode, device_mesh, kind):
    model = Gan(DistributedDataParallel if kind == "ddp" else lambda part: part)
    for part in (model.maker, model.judge, model):
        if kind.endswith("roots") * (part is not model) or kind == "one root":
            fully_shard(part, mesh=device_mesh())
    with comm_mode(model):
        for makes in (False, True):
            model.judge.requires_grad_(not makes)
            run(model, makes=makes)
            if kind == "by hand":
                for parameter in (model.maker if makes else model.judge).parameters():
                    dist.all_reduce(parameter.grad)
    assert set(words(comm_mode).values()) == {""}


def reentrant(model, x):
    checkpoint(model, x, use_reentrant=True).sum().backward()


def kept(model, x):
    checkpoint(model, x, use_reentrant=False).sum().backward()


def siamese(model, x):
    (model(x) + model(2 * x)).sum().backward()


def penalized(model, x):
    loss = model(x).sum()
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss + slope.sum()).backward()


def chosen(model, x):
    torch.autograd.backward(model(x).sum(), inputs=[*model.parameters()])


def twice(model, x):
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("backward", [reentrant, kept, siamese, penalized, chosen, twice])
def test_one_call_of_backward_is_one_pass(comm_mode, backward):
    model = layers()
    with comm_mode(model):
        for _ in range(2):
            backward(model, torch.randn(2, WIDTH, requires_grad=True))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    passes = 4 if backward is twice else 2
    assert set(words(comm_mode).values()) == {f"the last of {passes} backwards"}


@pytest.mark.distributed(world_size=2)
def test_ddp_reduces_once_for_one_forward(comm_mode):
    model = DistributedDataParallel(layers())
    with comm_mode(model):
        twice(model, torch.randn(2, WIDTH))
    assert words(comm_mode) == {"": "the first of 2 backwards"}


@needs_pipelines_on_gloo
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.distributed(world_size=4)
def test_pipeline_stage_reduces_in_last_backward(comm_mode, device_mesh):
    mesh = device_mesh(pp=2, dp=2)
    model = shard(layers(), mesh["dp"])
    number = mesh["pp"].get_local_rank()
    stage = pipelining.PipelineStage(
        model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=lambda output, _: output.sum())
    given = torch.randn(8, WIDTH)
    with comm_mode(model):
        schedule.step(*([] if number else [given]), **({"target": given} if number else {}))
    assert set(words(comm_mode, "reduce_scatter").values()) == {"the last of 4 backwards"}
