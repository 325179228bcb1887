"""Layouts of thousands of ranks on one, against numbers derived by hand."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.simulation.sharding import LazyChunks

WIDTH, HIDDEN, VOCABULARY, LAYERS = 4096, 14336, 128256, 3
BF16, FLOAT = 2, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model, optimizer):
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def padded(shape, ranks):
    return math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:])


def unit_numels(ranks):
    """Of a layer and of the root, with the padding that each parameter's first dimension takes."""
    layer = [(WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    root = [(VOCABULARY, WIDTH), (VOCABULARY, WIDTH)]
    return tuple(sum(padded(shape, ranks) for shape in unit) for unit in (layer, root))


@pytest.mark.distributed(world_size=[4096, 16384], simulate=True)
def test_fsdp_sends_what_the_sizes_say(comm_mode, fsdp_tree, device_mesh, dist_info):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    with comm_mode(model):
        loss = train(model, optimizer)
    layer, root = unit_numels(dist_info.world_size)
    assert comm_mode.nbytes("all_gather", owner="layers.1", phase="forward") == layer * BF16
    assert comm_mode.nbytes("all_gather") == (2 * LAYERS * layer + root) * BF16
    assert comm_mode.nbytes("reduce_scatter") == (LAYERS * layer + root) * FLOAT
    assert comm_mode.counts("all_reduce", phase="optimizer") == 1
    assert fsdp_tree(model).is_sharded
    assert loss.item() == 1.0  # outside of the block: nobody knows it
    assert comm_mode.recording.gaps == ()


@pytest.mark.distributed(world_size=8192, simulate=True, ranks=[0, 8191])
def test_two_axes_and_their_real_meshes(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(dp=-1, tp=8)
    assert mesh.mesh[0].tolist() == [*range(8)]
    assert [*mesh.get_coordinate()] == [dist_info.rank // 8, dist_info.rank % 8]
    assert mesh["tp"].mesh.tolist() == [dist_info.rank // 8 * 8 + place for place in range(8)]
    assert mesh["tp"] is mesh["tp"] is not mesh["dp"]
    model = Model()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with comm_mode(model):
        model(torch.zeros(1, 512, dtype=torch.int64)).sum().backward()
    assert comm_mode.counts("all_gather", axis="dp") == 2 * LAYERS + 1
    assert comm_mode.counts("all_reduce", axis="tp", phase="forward") == LAYERS
    assert (
        comm_mode.nbytes("all_reduce", axis="tp", phase="forward") == LAYERS * 512 * WIDTH * FLOAT
    )


@pytest.mark.distributed(world_size=8192, simulate=True)
def test_replicas_of_shards(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(replicate=128, shard=64))
    with comm_mode(model):
        train(model, torch.optim.SGD(model.parameters()))
    layer, root = unit_numels(64)
    assert comm_mode.nbytes("reduce_scatter", axis="shard") == (LAYERS * layer + root) * FLOAT
    assert (
        comm_mode.nbytes("all_reduce", axis="replicate", phase="backward")
        == (LAYERS * layer + root) * FLOAT // 64
    )


@pytest.mark.distributed(world_size=[2, 64], simulate=64)
def test_a_number_simulates_from_there_on(dist_info):
    is_simulated = dist_info.world_size == 64
    assert (dist_info.backend, dist.get_backend()) == ("fake" if is_simulated else "gloo", "gloo")
    assert (torch.rand(1).item() == 1.0) is is_simulated


@pytest.fixture(scope="module")
def shared():
    return nn.Linear(2, 2)


@pytest.mark.distributed(world_size=2, scope="module", simulate=True)
@pytest.mark.parametrize("number", range(2))
def test_tests_share_tensors_of_module_fixtures(number, shared):
    assert shared(torch.full((1, 2), float(number))).sum().item() == 1.0


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9, 16])
@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_lazy_chunks_equal_those_of_torch(size, num):
    tensor = torch.arange(size * 3).view(size, 3)
    theirs, ours = _fsdp_common._chunk_with_empty(tensor, num, 0), LazyChunks(tensor, num, 0)
    assert len(theirs) == len(ours) == num
    for one, other in zip(theirs, ours, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


@pytest.mark.distributed(world_size=64, simulate=True)
def test_cost_of_a_layer_does_not_grow_with_the_layers(device_mesh, monkeypatch):
    seen = {"modules listed": 0, "tensors looked through": 0}
    named_modules, args_spec = nn.Module.named_modules, OpSchema.args_spec.fget

    def list_modules(module, *args, **kwargs):
        for each in named_modules(module, *args, **kwargs):
            seen["modules listed"] += 1
            yield each

    def look_through(schema):
        found = args_spec(schema)
        seen["tensors looked through"] += len(found)
        return found

    def cost(num_layers):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seen.update(dict.fromkeys(seen, 0))
        with CommMode()(model):
            model(torch.zeros(1, 64)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return dict(seen)

    mesh = device_mesh()
    monkeypatch.setattr(nn.Module, "named_modules", list_modules)
    monkeypatch.setattr(OpSchema, "args_spec", property(look_through))
    few, many = cost(8), cost(32)
    for what in seen:
        assert many[what] <= 5 * few[what], (what, few, many)
