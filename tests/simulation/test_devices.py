"""Code that says "cuda" is simulated where there is no GPU, as if it said "cpu"."""

import os
import sys
import unittest
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn_functional
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, rand, randn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch_facts import HAS_DEVICE_INDEX, MESH_TAKES_BACKENDS

from pytest_fsdp_comm.simulation.devices import simulate_cuda
from pytest_fsdp_comm.simulation.values import SimulationError
from pytest_fsdp_comm.simulation.world import simulate_rank as simulation

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
    # The second mesh has groups of the same ranks, which have higher numbers.
    collectives = [replace(event, group_number=1) for event in recording.collectives]
    return collectives, recording.reshards, recording.redistributions


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


FSDP1_DEVICES = {
    "device": lambda: {"device_id": torch.device("cuda", 0)},
    "device without index": lambda: {"device_id": torch.device("cuda")},
    "text": lambda: {"device_id": "cuda"},
    "index": lambda: {"device_id": torch.cuda.current_device()},
    "none": dict,
    "mesh": lambda: {"device_mesh": init_device_mesh("cuda", (16,)), "device_id": 0},
}


@simulated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FSDP1_DEVICES)
def test_fsdp1_on_cuda_sends_what_the_cpu_sends(comm_mode, name):
    found = []
    for device in ("cpu", "cuda"):
        on_cuda = {**FSDP1_DEVICES[name](), "sync_module_states": True}
        options = {"device_id": torch.device("cpu")} if device == "cpu" else on_cuda
        model = Model().to(device if name == "none" else "cpu")
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, **options
        )
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        with comm_mode(model):
            train(model, device)
        found.append(events(comm_mode)[0])
    assert found[0]
    assert found[0] == found[1]


@simulated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["index", "none"])
def test_fsdp1_shards_within_hosts_of_gpus(comm_mode, name):
    """Without a mesh, FSDP1 asks how many devices a host has: 8 GPUs, but only one CPU."""
    model = FullyShardedDataParallel(
        Model().cuda() if name == "none" else Model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        **FSDP1_DEVICES[name](),
    )
    with comm_mode(model):
        train(model, "cuda")
    sizes = {(event.kind, event.group_size) for event in comm_mode.events if event.owner}
    assert sizes == {("all_gather", 8), ("reduce_scatter", 8), ("all_reduce", 2)}


@simulated
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_on_cuda_offloads_and_gathers_states(comm_mode):
    model = FullyShardedDataParallel(
        Model(), device_id=0, cpu_offload=CPUOffload(offload_params=True)
    )
    train(model, "cuda")
    model = FullyShardedDataParallel(Model("meta"), device_id=0, param_init_fn=to_cuda)
    train(model, "cuda")
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    options = (StateDictType.FULL_STATE_DICT, config)
    with comm_mode(model), FullyShardedDataParallel.state_dict_type(model, *options):
        states = model.state_dict()
    assert states["blocks.0.up.weight"].shape == (4 * WIDTH, WIDTH)
    assert comm_mode.counts("all_gather") == 1


def to_cuda(module):
    module.to_empty(device="cuda", recurse=False)


@simulated
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_creates_units_from_meta(comm_mode, use_orig_params):
    """To materialize the root, which has parameters, the function moves the units inside, too."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=use_orig_params,
        device_id=0,
        param_init_fn=lambda module: module.to_empty(device="cuda"),
    )
    with comm_mode(model):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
    # Each unit has 72 parameters, padded to a multiple of 16 ranks. The root stays gathered.
    sent = [(event.kind, event.nbytes, str(event.phase)) for event in comm_mode.events]
    assert {nbytes for _, nbytes, _ in sent} == {4 * 80}
    assert Counter((kind, phase) for kind, _, phase in sent) == {
        ("all_gather", "forward"): 3,
        ("all_gather", "backward"): 2,
        ("reduce_scatter", "backward"): 3,
    }


@simulated
def test_tensors_stay_on_cuda():
    half = torch.randn(2, 4, device="cuda", dtype=torch.bfloat16)
    cpu, norm = torch.randn(2, 4), nn.RMSNorm(4, device="cuda", dtype=torch.bfloat16)
    for tensor in (
        torch.randn(2, device="cuda").type_as(half),
        cpu.type_as(half),
        torch.as_tensor(half, dtype=torch.float64),
        half.new_tensor([1, 2]),
        half.to_sparse(),
        cpu.to_sparse().to("cuda"),
        nn.functional.pad(half, (1, 1), mode="circular"),
        norm(half),
        nn.functional.rms_norm(half, (4,)),
        cpu.new_tensor([1], device="cuda"),
    ):
        assert tensor.device.type == "cuda"
    for tensor in (
        half.type_as(cpu),
        half.to("cpu", torch.float64),
        half.cpu(),
        half.to_sparse().cpu(),
        cpu.new_tensor([1]),
        half.new_tensor([1], device="cpu"),
        torch.as_tensor(half, device="cpu"),
        nn.functional.rms_norm(cpu, (4,)),
    ):
        assert tensor.device.type == "cpu"


@simulated
@pytest.mark.filterwarnings("ignore")  # weight_norm is deprecated, but scripts still use it
def test_parameter_in_a_graph_moves_to_cuda():
    layer = nn.utils.weight_norm(nn.Linear(4, 4))
    layer.bias.is_expert = True
    parameters = [*layer.parameters()]
    layer.cuda()
    assert [*map(id, layer.parameters())] == [*map(id, parameters)]
    assert all(parameter.is_cuda for parameter in parameters)
    assert layer.bias.is_expert
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert layer.weight_v.grad.is_cuda


def to_cuda_everywhere(value):
    if isinstance(value, torch.Tensor):
        return value.to("cuda")
    is_cpu = isinstance(value, (str, torch.device)) and str(value) == "cpu"
    return "cuda" if is_cpu else value


NOT_ON_CUDA = {
    # These return no tensors.
    *("allclose", "broadcast_shapes", "equal", "item"),
    # torch compiles these for the GPU.
    *("jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args"),
    *("jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.distributed(world_size=2, simulate=True, timeout_s=600)
@pytest.mark.release
def test_operators_keep_tensors_on_cuda(monkeypatch):
    """Run the first sample of each of torch's operators."""
    # torch imports this package for tests of its own.
    monkeypatch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    operators = [op for op in op_db if op.dtypes and op.name not in NOT_ON_CUDA]
    assert len(operators) > 600
    on_cpu = []
    for op in operators:
        dtype = torch.float32 if torch.float32 in op.dtypes else min(op.dtypes, key=str)
        with unset_fake_temporarily():
            sample = next(iter(op.sample_inputs("cpu", dtype)))
        arguments = sample.input, sample.args, sample.kwargs
        first, args, kwargs = tree_map(to_cuda_everywhere, arguments)
        results = [
            result
            for result in tree_leaves(op(first, *args, **kwargs))
            if isinstance(result, torch.Tensor)
        ]
        assert results, op.name
        if not all(result.device.type == "cuda" for result in results):
            on_cpu.append(f"{op.name} {op.variant_test_name}")
    assert on_cpu == []


@simulated
def test_events_accept_keywords():
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    event.record(stream=stream)
    event.wait(stream=stream)


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
        with simulation(assumes=True):
            for name in names:
                assert getattr(torch, name)([1.0], device=0).device == torch.device("cuda:0")
                with torch.device("meta"):
                    assert getattr(torch, name)([1.0]).is_meta
    with torch.device("meta"):
        assert all(getattr(torch, name)([1.0]).is_meta for name in names)


@pytest.mark.distributed(world_size=2, backend="fake")
def test_a_simulation_does_not_know_earlier_meshes():
    for device_type in ("cuda", "cpu"):
        with simulation(assumes=True):
            assert torch.cuda.current_device() == 0
            assert init_device_mesh(device_type, (2,)).device_type == device_type
            torch.cuda.set_device(1)


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
    options = {"backend_override": {0: "nccl"}} if MESH_TAKES_BACKENDS else {}
    init_device_mesh("cuda", (20,), **options)
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
    device_index = torch.accelerator.device_index if HAS_DEVICE_INDEX else cuda.device
    with device_index(local_rank), cuda.stream(torch.Stream("cuda")):
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
    assert torch.histc(input=own, bins=bins, min=least, max=most).tolist() == counts
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
    with simulate_cuda(assumes=True):
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


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        pytest.param(*case, marks=pytest.mark.distributed(2, **options))
        for *case, options in (
            ("fake", ["all_gather", "all_to_all"], {"backend": "fake"}),
            ("gloo", ["all_gather", "scatter", "scatter"], {}),
            ("nccl", ["all_gather", "reduce_scatter"], {"simulate": True}),
        )
    ],
)
def test_gather_backward_is_noted_on_fake_backend(comm_mode, how, kinds):
    device = "cuda" if how == "nccl" else "cpu"
    with comm_mode:
        loss = torch.ones(3, device=device, requires_grad=True)
        torch.cat(nn_functional.all_gather(loss)).sum().backward()
    assert [one.kind for one in comm_mode.events] == kinds
    notes = [note for note in comm_mode.recording.notes if "reduce_scatter on NCCL" in note]
    assert len(notes) == (how == "fake")


@simulated
@pytest.mark.upstream
def test_mesh_takes_its_arguments_as_keywords():
    mesh = DeviceMesh(device_type="cuda", mesh=torch.arange(16), mesh_dim_names=("dp",))
    assert (mesh.device_type, mesh.size()) == ("cuda", 16)


@simulated
def test_backend_of_a_mesh_on_cuda_is_nccl():
    init_device_mesh("cuda", (16,))
    assert dist.get_backend() == "nccl"


@simulated
def test_random_dtensor_on_cuda_mesh_is_made():
    mesh = init_device_mesh("cuda", (16,))
    for make in (rand, randn):
        tensor = make(32, 8, device_mesh=mesh, placements=[Shard(0)])
        assert tensor.to_local().shape == (2, 8)
        assert nn.functional.dropout(tensor, 0.5).shape == (32, 8)


@simulated
def test_distribution_accepts_unknown_values():
    choice = torch.distributions.Categorical(logits=torch.randn(4, 6)).sample()
    chosen = torch.distributions.Categorical(logits=torch.randn(4, 6))
    assert chosen.log_prob(choice).shape == (4,)
    with pytest.raises(SimulationError):
        choice.tolist()


def local_shard(device):
    mesh = init_device_mesh(device, (4, 4), mesh_dim_names=("dp", "tp"))["tp"]
    return DTensor.from_local(torch.ones(2, 8, 64, device=device), mesh, [Shard(1)]), 2


def uneven_shard_from_cpu(device):
    mesh = init_device_mesh(device, (4, 4), mesh_dim_names=("dp", "tp"))["tp"]
    return distribute_tensor(torch.ones(10, 6), mesh, [Shard(0)]), 1


def parameter(device):
    return fully_shard(nn.Linear(32, 16, bias=False).to(device)).weight, 1


@simulated
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("device", "build", "sent", "shape"),
    [
        # A GPU sends its shard; a CPU gathers the shards of all ranks.
        ("cuda", local_shard, ("all_to_all", 4 * 2 * 8 * 64), (2, 32, 16)),
        ("cpu", local_shard, ("all_gather", 4 * 4 * 2 * 8 * 64), (2, 32, 16)),
        # Rank 0 has 3 of 10 rows, whose 6 columns are padded to a multiple of 4.
        ("cuda", uneven_shard_from_cpu, ("all_to_all", 4 * 3 * 8), (10, 2)),
        # Rank 0 has 1 of 16 rows.
        ("cuda", parameter, ("all_to_all", 4 * 32), (16, 2)),
    ],
)
def test_new_shard_dim_sends_what_a_gpu_sends(comm_mode, device, build, sent, shape):
    tensor, dim = build(device)
    with comm_mode:
        shard = tensor.requires_grad_().redistribute(placements=[Shard(dim)]).to_local()
        shard.sum().backward()
    events = comm_mode.recording.collectives[:2]  # before torch 2.13, some gradients are gathered
    assert [(event.kind, event.nbytes, event.exposed) for event in events] == [(*sent, True)] * 2
    assert shard.shape == shape


@simulated
def test_new_shard_dim_of_integers_keeps_values():
    """Assume that each rank along the axis has the integers of this rank, the first one."""
    mesh = init_device_mesh("cuda", (4, 4))
    rows = torch.arange(4, device="cuda").view(1, 4)
    local = DTensor.from_local(rows, mesh, [Shard(0), Shard(0)])
    assert local.redistribute(placements=[Shard(0), Shard(1)]).to_local().tolist() == [[0]] * 4
