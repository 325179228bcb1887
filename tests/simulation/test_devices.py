"""Code that says "cuda" is simulated where there is no GPU, as if it said "cpu"."""

import os
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn_functional
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_comm.simulation.devices import cuda_on_cpu
from pytest_fsdp_comm.simulation.values import SimulationError
from pytest_fsdp_comm.simulation.world import simulated as simulation

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used as it is")

simulated = pytest.mark.distributed(world_size=16, simulate=True)
WIDTH = 64


class Block(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, device=device)
        self.down = nn.Linear(4 * WIDTH, WIDTH, device=device)

    def forward(self, x):
        positions = torch.arange(x.shape[0], device=x.device).view(-1, 1)
        x = x + positions.to(x.device, x.dtype)
        return x + self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.1))


class Model(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(device) for _ in range(2))
        self.register_buffer("scale", torch.ones(1, device=device))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)
        return x * self.scale


def shard(model, mesh, **given):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **given)
    return fully_shard(model, mesh=mesh, **given)


def fsdp(device):
    return shard(Model().to(device), init_device_mesh(device, (16,)))


def hsdp(device):
    mesh = init_device_mesh(device, (4, 4), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(Model(device), mesh, mp_policy=policy)


def tensor_parallel(device):
    mesh = init_device_mesh(device, (4, 4), mesh_dim_names=("dp", "tp"))
    with torch.device(device):
        model = Model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return shard(model, mesh["dp"])


def meta(device):
    model = shard(Model("meta"), DeviceMesh(device, torch.arange(16)))
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def offload(device):
    return shard(Model(), init_device_mesh(device, (16,)), offload_policy=CPUOffloadPolicy())


def train(model, device, *, mixed=False, **how):
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    scaler = torch.amp.GradScaler(device, enabled=mixed)
    for _ in range(2):
        x = torch.randn(8, WIDTH).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def events(comm_mode):
    recording = comm_mode.recording
    assert recording.gaps == ()
    return recording.collectives, recording.reshards, recording.redistributions


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@simulated
@pytest.mark.parametrize(
    ("build", "how"),
    [
        (fsdp, {"foreach": True}),
        (fsdp, {"mixed": True}),
        (hsdp, {"fused": True}),
        (tensor_parallel, {}),
        (tensor_parallel, {"mixed": True}),
        (meta, {}),
        (offload, {"foreach": False}),
    ],
)
def test_a_step_on_cuda_sends_what_it_sends_on_the_cpu(comm_mode, fsdp_tree, build, how):
    found = []
    for device in ("cpu", "cuda"):
        model = build(device)
        with comm_mode(model):
            train(model, device, **how)
        found.append((events(comm_mode), fsdp_tree(model)))
    (sent, tree), (sent_on_cuda, tree_on_cuda) = found
    assert sent[0]
    assert sent == sent_on_cuda
    assert tree == tree_on_cuda


@simulated
def test_ddp_is_refused():
    with pytest.raises(SimulationError) as refused:
        DistributedDataParallel(Model().cuda(), device_ids=[0])
    text = str(refused.value)
    assert text.startswith("tests/simulation/test_devices.py:")
    assert text.endswith('or backend="fake" instead of simulate=')


@simulated
def test_devices_are_read_back_as_they_were_asked_for():
    assert torch.rand(2).device.type == "cpu"
    torch.cuda.set_device(3)
    there = torch.device("cuda", 3)
    made = (
        torch.zeros(2, device="cuda"),
        torch.rand(2).cuda(),
        torch.rand(2).to("cuda", torch.bfloat16),
        torch.rand(2).pin_memory().to(there, non_blocking=True),
        torch.rand(2).to(torch.rand(2, device="cuda")),
        torch.tensor([1, 2], device="cuda"),
        nn.Linear(2, 2).cuda().weight,
        nn.Linear(2, 2).to(3).weight,
        nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    )
    # Of a list, torch names the first one where tensors have no memory.
    assert [own.device for own in made if own is not made[5]] == [there] * (len(made) - 1)
    assert all(own.is_cuda for own in made)
    one = made[0]
    assert (one + 1).view(1, 2).device == one.detach()[1:].device == there
    assert not one.cpu().is_cuda
    assert one.to("cpu").device.type == "cpu"
    assert one.device == there
    assert made[5].tolist() == [1, 2]
    with torch.device("cuda"):
        assert torch.ones(1).is_cuda
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(2, 2).weight.is_cuda
    finally:
        torch.set_default_device(None)


@pytest.mark.distributed(world_size=4, backend="fake")
def test_devices_are_the_same_in_each_simulation():
    names = ("tensor", "as_tensor", "asarray")
    for _ in range(2):
        with simulation(answers=True):
            for name in names:
                assert getattr(torch, name)([1.0], device=0).device == torch.device("cuda:0")
                with torch.device("meta"):
                    assert getattr(torch, name)([1.0]).is_meta
    with torch.device("meta"):
        assert all(getattr(torch, name)([1.0]).is_meta for name in names)


@simulated
def test_what_fsdp_moves_and_gathers_is_on_cuda():
    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))
    assert mesh.device_type == mesh["dp"].device_type == "cuda"
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["dp"])
    assert model.weight.device.type == "cuda"
    seen = []

    def look(module, args):
        seen.append((type(module.weight), module.weight.device.type, args[0].device.type))

    model.register_forward_pre_hook(look)
    model(torch.rand(2, 8, device="cuda")).sum().backward()
    assert seen[0][1:] == ("cuda", "cuda")
    assert model.weight.grad.device.type == "cuda"
    assert isinstance(model.weight, DTensor)


@simulated
def test_what_is_asked_of_a_gpu_is_answered(comm_mode):
    cuda = torch.cuda
    cuda.init()
    cuda.manual_seed_all(3)
    assert cuda.is_available()
    assert cuda.current_device() == 0
    assert cuda.device_count() == 8
    assert cuda.get_device_properties(0).total_memory == 80 * 2**30
    assert cuda.memory_allocated() == cuda.max_memory_reserved() == 0
    assert cuda.memory_stats()["active_bytes.all.peak"] == 0
    cuda.reset_peak_memory_stats()
    cuda.empty_cache()
    stream, start = cuda.Stream(), cuda.Event(enable_timing=True)
    with torch.random.fork_rng(devices=[0], device_type="cuda"):
        cuda.set_rng_state(cuda.get_rng_state())
    with cuda.stream(stream), cuda.device(0):
        start.record()
        torch.rand(2, device="cuda").record_stream(cuda.current_stream())
    stream.wait_stream(cuda.current_stream())
    assert start.elapsed_time(cuda.Event()) == 1.0
    cuda.synchronize()
    assert torch.get_device_module() is torch.get_device_module("cuda") is cuda
    if hasattr(torch, "accelerator"):
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.accelerator.synchronize()
    with comm_mode:
        dist.barrier()
    given = {(one.how, one.value) for one in comm_mode.recording.answers}
    assert given == {
        ("torch.cuda.get_device_properties", "H100"),
        ("torch.cuda.memory_allocated", "0"),
        ("torch.cuda.max_memory_reserved", "0"),
        ("torch.cuda.memory_stats", "0"),
        ("elapsed_time", "1.0"),
    }


@pytest.mark.distributed(world_size=20, simulate="strict", ranks=[17])
def test_preamble_of_gpu_script_runs():
    local_rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda
    assert (local_rank, os.environ["LOCAL_WORLD_SIZE"]) == (1, "4")  # of the last host
    assert cuda.device_count() == torch.accelerator.device_count() == 4
    assert cuda.is_available()
    assert torch.backends.cuda.is_built()
    assert torch.backends.cudnn.is_available()
    assert torch.version.cuda
    assert dist.is_nccl_available()
    cuda.set_device(local_rank)
    there = torch.device("cuda", local_rank)
    for backend in ("nccl", "gloo", "cpu:gloo,cuda:nccl"):
        assert dist.new_group([0, 17], backend=backend).size() == 2
    init_device_mesh("cuda", (20,), backend_override={0: "nccl"})
    made = (
        torch.zeros(2, device=local_rank),
        torch.empty(2, device=cuda.current_device()),
        nn.Linear(2, 2, device=local_rank).weight,
        torch.randn(2, generator=torch.Generator("cuda").manual_seed(3), device=there),
        torch.zeros(2, pin_memory=True).to(local_rank, non_blocking=True),
    )
    assert {own.device for own in made} == {there}
    assert made[0].get_device() == local_rank
    assert isinstance(torch.default_generator, torch.Generator)
    cuda.memory._record_memory_history(max_entries=9)
    cuda.memory._dump_snapshot("not written")
    cuda.profiler.start()
    with torch.accelerator.device_index(local_rank), torch.cuda.stream(torch.Stream("cuda")):
        assert not cuda.is_current_stream_capturing()
    assert cuda.initial_seed() == torch.initial_seed()


@simulated
@pytest.mark.parametrize(
    ("values", "bins", "least", "most"),
    [
        ([0, 1, 1, 3], 4, 0, 4),
        ([0, 1, 1, 4, 9, -2], 4, 0, 4),
        ([[5, 7], [7, 12]], 3, 0, 0),
        ([6, 6], 4, 0, 0),
        ([0, 10, 4, 7], 3, 1, 10),
    ],
)
def test_histc_counts_integers_on_cuda(values, bins, least, most):
    with unset_fake_temporarily():
        counts = torch.histc(torch.tensor(values, dtype=torch.double), bins, least, most).tolist()
    own = torch.tensor(values, device="cuda")
    assert torch.histc(own, bins=bins, min=least, max=most).tolist() == counts
    assert own.histc(bins, least, most).device.type == "cuda"
    with pytest.raises(RuntimeError, match="not implemented for"):
        own.cpu().histc(bins, least, most)


@torch.library.custom_op("fsdp_comm_tests::sum_of", mutates_args={"own"})
def sum_of(own: torch.Tensor, group: str) -> None:
    if group:
        dist.all_reduce(own, group=distributed_c10d._resolve_process_group(group))


@simulated
def test_custom_operator_with_group_is_recorded(comm_mode):
    with comm_mode:
        for own in (torch.randn(4), torch.tensor([1, 2])):
            sum_of(own.cuda(), dist.group.WORLD.group_name)
            sum_of(own, "")
    assert [one.kind for one in comm_mode.recording.collectives] == ["all_reduce"] * 2


@pytest.mark.distributed(world_size=2, simulate="strict")
def test_a_strict_simulation_knows_no_gpu():
    assert torch.rand(2, device="cuda").is_cuda
    with pytest.raises(SimulationError) as refused:
        torch.cuda.get_device_name()
    assert "tests/simulation/test_devices.py:" in str(refused.value)
    assert "reads torch.cuda.get_device_name, but a simulated rank has no GPU" in str(refused.value)


@pytest.mark.distributed(world_size=2)
def test_real_ranks_keep_torch_unchanged():
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.rand(2).cuda()


def test_everything_is_undone():
    def holders():
        places = (torch, torch.cuda, torch.Tensor, torch.accelerator, DeviceMesh, torch.autocast)
        places += (torch.version, torch.cuda.memory, nn.functional, torch.backends.cudnn)
        return [dict(vars(place)) for place in places]

    before = holders()
    with cuda_on_cpu(answers=True):
        assert holders() != before
    assert holders() == before


OPTIMIZERS = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "RMSprop", "Rprop"]


@pytest.mark.parametrize("foreach", [False, True])
@simulated
def test_capturable_optimizers_step_on_cuda_alone(foreach):
    for device, name in product(("cpu", "cuda"), OPTIMIZERS):
        model = nn.Linear(4, 4).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), capturable=True, foreach=foreach)
        model(torch.rand(2, 4, device=device)).sum().backward()
        refused = pytest.raises(AssertionError, match="must be on supported devices")
        with nullcontext() if device == "cuda" else refused:
            optimizer.step()


@simulated
def test_sync_batch_norm_sends_what_a_gpu_sends(comm_mode):
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(layers).to(torch.bfloat16)
    images = torch.rand(2, 3, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        model(images)
    with comm_mode(model.cuda()):
        result = model(images.cuda())
        assert (result.dtype, result.is_cuda) == (torch.bfloat16, True)
        result.sum().backward()
    sent = [(one.kind, one.dtype, one.nbytes_sent, one.phase.value) for one in comm_mode.events]
    # Mean and deviation of each channel and a count; two sums of each.
    assert sent == [
        ("all_gather", "float32", (2 * 5 + 1) * 4, "forward"),
        ("all_reduce", "float32", 2 * 5 * 4, "backward"),
    ]
    assert {one.grad.dtype for one in model.parameters()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@simulated
def test_backend_is_that_of_the_devices_used(comm_mode):
    assert dist.get_backend() == dist.get_backend(dist.group.WORLD) == "gloo"
    with comm_mode:
        loss = torch.ones(3, device="cuda", requires_grad=True)
        torch.cat(nn_functional.all_gather(loss)).sum().backward()
    assert dist.get_backend() == "nccl"
    assert [one.kind for one in comm_mode.events] == ["all_gather", "reduce_scatter"]


@simulated
@pytest.mark.upstream
def test_mesh_takes_its_arguments_as_keywords():
    mesh = DeviceMesh(device_type="cuda", mesh=torch.arange(16), mesh_dim_names=("dp",))
    assert (mesh.device_type, mesh.size()) == ("cuda", 16)


@simulated
def test_backend_of_a_mesh_on_cuda_is_nccl():
    init_device_mesh("cuda", (16,))
    assert dist.get_backend() == "nccl"
