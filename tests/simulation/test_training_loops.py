"""What else is in a training loop: each sends what it does on gloo, or is refused in words."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import lines
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from pytest_fsdp_comm.simulation.values import SimulationError

WIDTH, FLOAT = 8, 4
RANKS = 4
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Block(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(super().forward(x))


class Model(nn.Module):
    """Two blocks, which `run` calls, and a weight of the root."""

    def __init__(self, run=lambda block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x * self.scale


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Loop:
    """A model with a step, to which cases add."""

    def __init__(self, mesh, run=lambda block, x: block(x), **how):
        self.mesh, self.model = mesh, shard(Model(run), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **how)

    def backward(self, x=None, call=None):
        x = torch.randn(4, WIDTH) if x is None else x
        x.requires_grad_()  # otherwise the root reduces before the first block
        loss = (self.model if call is None else call)(x).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, x=None, call=None):
        loss = self.backward(x, call)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def nbytes(owner, ranks):
    """Of a weight, padded to rows that all ranks have alike."""
    return -(-WIDTH // ranks) * ranks * (1 if owner == "." else WIDTH) * FLOAT


def forward(ranks):
    owners = [(".", "."), ("blocks.0", "blocks.0"), ("blocks.1", "blocks.1")]
    return [f"forward {one} all_gather[dp] {nbytes(one, ranks)} < {at}" for one, at in owners]


def one_step(ranks):
    gathers = [("blocks.1", "."), ("blocks.0", "blocks.1")]
    reduces = [("blocks.1", "blocks.1"), ("blocks.0", "blocks.0"), (".", ".")]
    return [
        *forward(ranks),
        *(f"backward {one} all_gather[dp] {nbytes(one, ranks)} < {at}" for one, at in gathers),
        *(f"backward {one} reduce_scatter[dp] {nbytes(one, ranks)} < {at}" for one, at in reduces),
    ]


def gathered(ranks):
    """The weights, outside of forward and backward, and AdamW's state, which has no owner."""
    sizes = {one: nbytes(one, ranks) for one in (".", "blocks.0", "blocks.1")}
    weights = [f"outside {one} all_gather[dp] {size} < -" for one, size in sizes.items()]
    return weights + [
        f"outside - all_gather[dp] {size} < -" for size in sizes.values() for _ in range(2)
    ]


CASES = {}


def case(*, sends=one_step, build=Loop):
    def add(run):
        CASES[run.__name__] = (build, run, sends)
        return run

    return add


def checkpointing(**how):
    return lambda mesh: Loop(mesh, lambda block, x: checkpoint(block, x, **how))


for reentrant in (False, True):
    for kept in (False, True):
        CASES[f"checkpointing, {reentrant=}, {kept=}"] = (
            checkpointing(use_reentrant=reentrant, preserve_rng_state=kept),
            Loop.step,
            one_step,
        )


def wrapped(mesh):
    loop = Loop.__new__(Loop)
    model = Model()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    loop.mesh, loop.model = mesh, shard(model, mesh)
    loop.optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    return loop


@case(build=wrapped)
def checkpoint_wrapper_and_lr_of_a_tensor(loop):
    scheduler = lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    loop.step()
    scheduler.step()
    assert float(scheduler.get_last_lr()[0]) == pytest.approx(0.05)


@case()
def seeds_and_states(loop):
    torch.manual_seed(5)
    assert torch.initial_seed() == 5
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    generator.set_state(generator.get_state())
    torch.rand(3, generator=generator)
    loop.step()


def step_and_draw(ranks):
    # Since torch 2.15 trunc_normal_ gathers which of the numbers it has to draw again.
    sizes = [6, 24] if torch.__version__ >= (2, 15) else [24]
    return [*one_step(ranks), *(f"outside - all_gather[dp] {ranks * size} < -" for size in sizes)]


@case(sends=step_and_draw)
def random_operations_of_dtensors(loop):
    loop.step()
    drawn = DTensor.from_local(torch.rand(2, 3), loop.mesh, [Shard(0)])
    nn.init.trunc_normal_(nn.init.normal_(nn.functional.dropout(drawn, 0.5)))
    assert drawn.redistribute(loop.mesh, [Replicate()]).to_local().shape == drawn.shape
    nn.init.normal_(loop.model.scale)


def compiled(mesh):
    loop = Loop(mesh)
    for block in loop.model.blocks:
        block.compile(backend="eager")
    return loop


@case(build=compiled)
def compiled_layers(loop):
    loop.step()


@case(sends=lambda ranks: 2 * one_step(ranks))
def compiled_models_and_losses(loop):
    loop.step(call=torch.compile(loop.model, backend="eager"))
    loss = torch.compile(lambda y: y.square().mean(), backend="eager")
    loss(loop.model(torch.randn(4, WIDTH, requires_grad=True))).backward()


@case(sends=lambda ranks: [*one_step(ranks), "outside - all_reduce[dp] 4 < -"])
def a_scaler_of_gradients(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    stepped = []
    loop.optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.model(torch.randn(4, WIDTH, requires_grad=True)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    assert stepped == [1]
    assert scaler.get_scale() == 8.0
    scaler.load_state_dict(scaler.state_dict())


@case(
    sends=lambda ranks: [
        *one_step(ranks),
        *forward(ranks),
        "outside - all_reduce[dp] 4 < -",
        *forward(ranks)[1:],  # the root stays gathered until a backward
        *one_step(ranks)[1:],
    ]
)
def evaluation_between_steps(loop):
    loop.step()
    loop.model.eval()
    with torch.no_grad():
        loss = loop.model(torch.randn(4, WIDTH)).square().mean()
    dist.all_reduce(loss)
    assert float(f"{loss:.2f}") >= 0
    assert loss.numpy().shape == ()
    with torch.inference_mode():
        assert loop.model(torch.randn(4, WIDTH)).numpy().shape == (4, WIDTH)
    loop.model.train()
    loop.step()


@case()
def schedulers(loop):
    made = [
        lr_scheduler.CosineAnnealingLR(loop.optimizer, 3),
        lr_scheduler.LambdaLR(loop.optimizer, lambda epoch: 1 / (epoch + 1)),
        lr_scheduler.ReduceLROnPlateau(loop.optimizer),
    ]
    loss = loop.step()
    for scheduler in made:
        scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))


@case()
def averages_of_weights(loop):
    kept = {name: own.detach().clone() for name, own in loop.model.named_parameters()}
    loop.step()
    with torch.no_grad():
        for name, own in loop.model.named_parameters():
            kept[name].lerp_(own, 0.1)
        torch._foreach_mul_([*kept.values()], 0.9)


@case(sends=lambda ranks: 2 * one_step(ranks))
def copies(loop):
    loop.step()
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer.load_state_dict(state)
    loop.step()
    copy.deepcopy(loop.model.state_dict())
    known = nn.Parameter(torch.arange(3.0))
    both = copy.deepcopy([known, known])
    assert both[0] is both[1]
    assert isinstance(both[0], nn.Parameter)
    assert both[0].tolist() == [0, 1, 2]
    assert both[0].numpy(force=True).tolist() == [0, 1, 2]
    ordinary = shard(copy.deepcopy(Model()), loop.mesh)
    assert {*ordinary.state_dict()} == {*loop.model.state_dict()}


@case(sends=lambda ranks: 4 * one_step(ranks))
def data_in_any_order(loop):
    data = TensorDataset(torch.randn(32, WIDTH), torch.arange(32))
    half, _ = random_split(data, [0.5, 0.5])
    sampler = DistributedSampler(half, num_replicas=2, rank=0)
    loaders = [
        DataLoader(half, 8, shuffle=True, num_workers=2, timeout=60, persistent_workers=True),
        DataLoader(half, 8, sampler=sampler),
        DataLoader(half, 16, generator=torch.Generator().manual_seed(1), shuffle=True),
    ]
    seen = []
    for loader in loaders:
        for x, numbers in loader:
            seen.append(numbers.tolist())
            loop.step(x)
    assert [len(numbers) for numbers in seen] == [8, 8, 8, 16]
    assert sorted(seen[0] + seen[1]) == sorted(seen[3])


@case(sends=lambda ranks: one_step(ranks) + gathered(ranks))
def states_that_are_whole(loop):
    loop.step()
    get_model_state_dict(loop.model, options=FULL)
    get_optimizer_state_dict(loop.model, loop.optimizer, options=FULL)
    get_model_state_dict(loop.model)
    weights, state = get_state_dict(loop.model, loop.optimizer)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=weights, optim_state_dict=state)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # the compiler
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("gloo", marks=pytest.mark.distributed(RANKS, backend="gloo")),
        pytest.param("fake", marks=pytest.mark.distributed(RANKS, simulate=True, ranks=[0, 3])),
        pytest.param("fake", marks=pytest.mark.distributed(8192, simulate=True), id="8192"),
    ],
)
def test_a_loop_sends_what_it_does_on_gloo(way, comm_mode, device_mesh, dist_info):
    assert dist_info.backend == way
    wrong = {}
    for name, (build, run, sends) in CASES.items():
        if way == "gloo" and "compiled" in name:
            continue  # tests/recording/test_recompiles.py: it sends what is not compiled sends
        loop = build(device_mesh())
        with comm_mode(loop.model):
            run(loop)
        found, expected = lines(comm_mode), sends(dist_info.world_size)
        if found != expected or comm_mode.recording.gaps:
            wrong[name] = (found, expected, str(comm_mode.recording.gaps))
    assert not wrong, json.dumps(wrong, indent=1)


REFUSED = {
    "torch.save": lambda loop: torch.save(loop.model.state_dict(), io.BytesIO()),
    "pickle": lambda _: pickle.dumps(torch.rand(3)),
    "dcp.save": lambda loop: dcp.save(loop.model.state_dict(), checkpoint_id="step"),
    "dcp.load": lambda loop: dcp.load(loop.model.state_dict(), checkpoint_id="step"),
    "gather_object": lambda _: dist.gather_object(1, [None] * 8192),
    "all_gather_object": lambda _: dist.all_gather_object([None] * 8192, 1),
    "broadcast_object_list": lambda _: dist.broadcast_object_list([None], src=1),
    "a count": lambda loop: (loop.model(torch.rand(4, WIDTH)) > 0).sum().item(),
    "an array of numbers": lambda _: torch.rand(3).long().numpy(),
}


@pytest.mark.distributed(world_size=8192, simulate=True)
def test_unknown_value_error_has_line_and_remedy(device_mesh, monkeypatch, tmp_path):
    loop = Loop(device_mesh())
    monkeypatch.chdir(tmp_path)
    for name, run in REFUSED.items():
        with pytest.raises(SimulationError) as refused:
            run(loop)
        text = str(refused.value)
        assert text.startswith(f"{__file__}:{run.__code__.co_firstlineno} "), name
        assert "on real ranks, without simulate=" in text, name


@pytest.mark.distributed(world_size=4, simulate=True)
def test_objects_of_this_rank_are_its_own(device_mesh):
    objects = [{"seed": 3}]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [{"seed": 3}]
    alone = device_mesh(dp=4, ep=1).get_group("ep")
    objects = [None]
    dist.all_gather_object(objects, "a", group=alone)
    assert objects == ["a"]


@pytest.mark.distributed(world_size=4, simulate="strict")
def test_strict_simulation_finds_finite_gradients(device_mesh):
    loop = Loop(device_mesh())
    loop.backward()
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.isfinite(norm)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.distributed(world_size=4, simulate=True)
def test_scripts_run_as_they_are_written():
    @torch.jit.script
    def padded(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([x, torch.zeros(size - x.size(0), x.size(1))])

    assert padded(torch.rand(3, WIDTH), 5).shape == (5, WIDTH)
