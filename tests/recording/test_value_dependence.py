"""On the fake group, user code that reads values in forward or backward is a gap."""

import inspect
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import WIDTH, Block, Model, shard, step
from oracle import gloo_and_fake
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import one_hot

fake = pytest.mark.distributed(world_size=2, backend="fake", scope="module")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Forward(nn.Module):
    """Runs a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def texts(comm_mode):
    recording = comm_mode.recording
    assert {gap.kind for gap in recording.gaps} <= {"value_dependent"}
    found = [gap.text for gap in recording.gaps]
    assert list(recording.notes) == found
    return found


def here(function, offset=1):
    """Where the lines of a function are, or of a lambda."""
    name, code = __file__.rpartition("/tests/")[2], function.__code__
    return f"tests/{name}:{code.co_firstlineno + (code.co_name != '<lambda>') * offset}"


# Code that must be a gap.


def item(x):
    return x.sum().item()


def nonzero(x):
    return x.nonzero()


def tolist(x):
    return x.tolist()


def numpy(x):
    return x.numpy()


def array(x):
    return np.asarray(x)


def split_by_numbers(x):
    return torch.cat([*x.tensor_split(2), *torch.tensor_split(x, (1, 3))])


def counted(x):
    return one_hot(x.long())


def reduced(x):
    return funcol.all_reduce(x.sum(), "sum", dist.group.WORLD).item()


def distributed(x):
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).sum().item()


@fake
@pytest.mark.parametrize(("function", "line"), [(reduced, 1), (distributed, 2)])
def test_what_reads_values_of_a_wrapper_is_named(comm_mode, function, line):
    model = Forward(function)
    with comm_mode(model):
        model(torch.ones(4))
    assert texts(comm_mode) == [f"{here(function, line)} reads the values of a tensor (item)"]


@fake
@pytest.mark.parametrize(
    ("function", "how"),
    [
        (item, "item"),
        (lambda x: bool(x.sum() > 0), "item"),
        (lambda x: range(int(x.sum())), "item"),
        (nonzero, "nonzero"),
        (lambda x: torch.where(x > 0), "nonzero"),
        (lambda x: torch.bincount(x.long()), "bincount"),
        (lambda x: x[x > 0], "a boolean mask"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (tolist, "tolist"),
        (numpy, "numpy"),
        (array, "numpy"),
        (counted, "item"),
        (lambda x: x.tensor_split(x.long().cumsum(0)[:2]), "tensor_split"),
        (
            lambda x: torch.tensor_split(x, tensor_indices_or_sections=x.long().cumsum(0)[:2]),
            "tensor_split",
        ),
    ],
)
def test_what_reads_values_in_forward_is_named_once(comm_mode, function, how):
    model = Forward(function)
    with comm_mode(model):
        for _ in range(3):
            model(torch.ones(4))
    assert texts(comm_mode) == [f"{here(function)} reads the values of a tensor ({how})"]


@fake
@pytest.mark.filterwarnings("ignore:Sparse")  # torch says that they are in beta state
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to_sparse(),
        lambda x: x.reshape(2, 2).to_sparse_csr(),
        lambda x: x.reshape(2, 2).to_sparse_csc(),
        lambda x: x.reshape(2, 2).to_sparse_bsr((1, 2)),
        lambda x: x.reshape(2, 2).to_sparse_bsc((1, 2)),
    ],
)
def test_conversion_to_sparse_is_named_by_its_read(comm_mode, function):
    model = Forward(function)
    with comm_mode(model):
        model(torch.ones(4))
    # The second in torch 2.7.
    hows = ("nonzero", "masked_select")
    expected = [f"{here(function)} reads the values of a tensor ({how})" for how in hows]
    assert texts(comm_mode) in ([one] for one in expected)


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * gradient.sum().item()


@fake
def test_what_reads_values_in_backward_is_named(comm_mode):
    with comm_mode:
        Reads.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert texts(comm_mode) == [f"{here(Reads.backward, 2)} reads the values of a tensor (item)"]


@fake
def test_a_checkpointed_read_is_named_once(comm_mode):
    def function(x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: y * y.sum().item(), x, use_reentrant=False
        )

    model = Forward(function)
    with comm_mode(model):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(texts(comm_mode)) == 1


def uneven():
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3], [2, 2])


def uneven_functional():
    funcol.all_to_all_single(torch.ones(4), [2, 2], [3, 1], dist.group.WORLD)


def uneven_list():
    # The fake group copies what stays on this rank.
    dist.all_to_all([torch.empty(1), torch.empty(3)], [torch.ones(1), torch.ones(3)])


@fake
@pytest.mark.parametrize("send", [uneven, uneven_functional, uneven_list])
def test_parts_of_unequal_size_are_named(comm_mode, send):
    with comm_mode:
        send()
        send()
    where = here(send, len(inspect.getsourcelines(send)[0]) - 1)
    assert texts(comm_mode) == [f"{where} sends parts of unequal size (all_to_all)"]


# Code that must not.


@fake
def test_tensor_split_by_numbers_reads_nothing(comm_mode):
    own = torch.tensor_split, torch.Tensor.tensor_split
    model = Forward(split_by_numbers)
    with comm_mode(model):
        model(torch.ones(4))
    assert texts(comm_mode) == []
    assert (torch.tensor_split, torch.Tensor.tensor_split) == own


def train(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    with comm_mode(model):
        loss = model(torch.ones(2, WIDTH)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        seen = [loss.item(), total.full_tensor().item(), loss.tolist(), loss.detach().numpy()]
        sys.stdout.write(f"{seen}\n")
        if loss.isnan():
            raise AssertionError


def scale(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comm_mode(model):
        scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def set_up(comm_mode, _mesh):
    with comm_mode:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = Block()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        step(model)


def checkpointed(comm_mode, device_mesh):
    model = shard(Model(reentrant=False), device_mesh())
    with comm_mode(model):
        step(model)


def compiled(comm_mode, device_mesh):
    model = Model()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    shard(model, device_mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, on graphs that it breaks
        with comm_mode(model):
            step(model)


def harmless(comm_mode, _mesh):
    def function(x):
        x = x[torch.tensor([1, 0])] + x.repeat_interleave(torch.tensor([1, 1]), output_size=2)
        classes = one_hot(x.long(), 8) + torch.nn.functional.one_hot(x.long(), num_classes=8)
        shape = classes.shape.numel()
        return x.masked_fill(x > 0, 0.0) + torch.where(x > 0, x, x) + shape

    model = Forward(function)
    with comm_mode(model):
        model(torch.ones(2))


def even(comm_mode, _mesh):
    with comm_mode:
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 2])
        dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2), torch.ones(2)])


def objects(comm_mode, _mesh):
    with comm_mode:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        torch.ones(2).tolist()


def transformers(comm_mode, device_mesh):
    found = pytest.importorskip("transformers")
    config = found.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = found.LlamaForCausalLM(config)
    torch.distributed.fsdp.fully_shard(model, mesh=device_mesh())
    tokens = torch.ones(2, 4, dtype=torch.long)
    for padded in (torch.ones_like(tokens), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])):
        with comm_mode(model):
            model(tokens, attention_mask=padded, labels=tokens).loss.backward()
        assert texts(comm_mode) == []


@fake
@pytest.mark.parametrize(
    "work",
    [
        *(train, scale, set_up, checkpointed),
        pytest.param(compiled, marks=pytest.mark.upstream),
        *(harmless, even, objects, transformers),
    ],
)
def test_ordinary_training_has_no_gap(comm_mode, device_mesh, work):
    work(comm_mode, device_mesh)
    assert texts(comm_mode) == []


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("function", [item, nonzero, tolist])
def test_values_that_are_exchanged_are_no_gap(comm_mode, function):
    model = Forward(function)
    with comm_mode(model):
        model(torch.ones(4))
    assert texts(comm_mode) == []
    mine, others = ([2, 2], [2, 1]) if dist.get_rank() == 0 else ([1, 3], [2, 3])
    with comm_mode:
        dist.all_to_all_single(torch.empty(sum(others)), torch.ones(4), others, mine)
    assert texts(comm_mode) == []


@gloo_and_fake(2)
@pytest.mark.parametrize("function", [tolist, numpy, array])
def test_reading_methods_compile_during_recording(comm_mode, function):
    def calls():
        torch._dynamo.reset()
        explained = torch._dynamo.explain(lambda x: (x * 2, function(x)))(torch.ones(2))
        return explained.graph_count, explained.graph_break_count

    before = calls()
    with comm_mode:
        during = calls()
    assert during == before
