"""Tensor subclasses: each collective is recorded once, with its real size."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import gloo_and_fake, lines, witnessed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

NUMEL = 8
NBYTES = 4 * NUMEL

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def sent(comm_mode):
    return [
        (event.kind, event.dtype, event.nbytes_sent, event.nbytes_received)
        for event in comm_mode.events
    ]


class Opaque(torch.Tensor):
    """Holds a tensor and has a dispatch method, but no flatten methods."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Opaque, lambda opaque: opaque.held, (args, kwargs or {}))
        return func(*args, **kwargs)


class OpaqueThatGathers(Opaque):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def gathered(tensor):
            return funcol.all_gather_tensor(tensor.held, 0, dist.group.WORLD).wait()

        args, kwargs = tree_map_only(Opaque, gathered, (args, kwargs or {}))
        return func(*args, **kwargs)


class Gathers(OpaqueThatGathers):
    """Has the flatten methods that torch.compile requires, like torchao's weights."""

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Gathers(inner["held"])


class Unseen(Opaque):
    """Sends below all dispatch keys where modes are called."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return super().__torch_dispatch__(func, types, args, kwargs)


class Halved(Opaque):
    """Sends its numbers at half the width."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(
            Opaque, lambda opaque: opaque.held.half(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class Plain(torch.Tensor):
    pass


class Quantized(torch.Tensor):
    """As torchao's Float8Tensor: says bfloat16, holds and sends one byte an element."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=torch.bfloat16, device=data.device
        )

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantized(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (first, *rest), kwargs = args, kwargs or {}
        if isinstance(first, (list, tuple)):  # of torch.cat
            data = func([entry.data_ for entry in first], *rest, **kwargs)
            return Quantized(data, first[0].scale)
        return tree_map_only(
            torch.Tensor,
            lambda data: Quantized(data, first.scale),
            func(first.data_, *rest, **kwargs),
        )


@gloo_and_fake(2)
@pytest.mark.parametrize("kind", [Gathers, OpaqueThatGathers])
def test_collective_in_subclass_dispatch_is_recorded(comm_mode, kind):
    tensor = kind(torch.ones(NUMEL))
    witnessed(comm_mode, None, lambda: tensor + 1, profiler=False)
    assert sent(comm_mode) == [("all_gather", "float32", NBYTES, 2 * NBYTES)]


class Adds(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = kind(torch.ones(NUMEL))

    def forward(self, x):
        return self.weight + torch.cat([x, x])


@gloo_and_fake(2)
@pytest.mark.parametrize("kind", [Gathers, OpaqueThatGathers])
@pytest.mark.parametrize("is_given", [True, False], ids=["given model", "bare"])
def test_the_owner_is_the_module_that_runs(comm_mode, kind, is_given):
    model = nn.Sequential(nn.ReLU(), Adds(kind))
    witnessed(
        comm_mode, model if is_given else None, lambda: model(torch.ones(NUMEL)), profiler=False
    )
    assert lines(comm_mode) == [f"forward 1 all_gather[world] {2 * NBYTES} < 1"]


@gloo_and_fake(2)
@pytest.mark.parametrize("kind", [Opaque, Unseen, Plain, nn.Parameter])
def test_a_subclass_that_is_sent_is_recorded_once(comm_mode, kind):
    tensor = torch.ones(NUMEL)
    tensor = tensor.as_subclass(Plain) if kind is Plain else kind(tensor)

    def send():
        torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)

    witnessed(comm_mode, None, send, profiler=False)
    assert sent(comm_mode) == [("all_reduce", "float32", NBYTES, NBYTES)]


@gloo_and_fake(2)
def test_opaque_subclass_is_recorded_as_sent(comm_mode):
    tensor = Halved(torch.ones(NUMEL))

    def send():
        torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)

    witnessed(comm_mode, None, send, profiler=False)
    assert sent(comm_mode) == [("all_reduce", "float16", NBYTES // 2, NBYTES // 2)]


@gloo_and_fake(2)
def test_a_subclass_of_two_tensors_sends_both(comm_mode):
    tensor = TwoTensor(torch.ones(NUMEL), torch.ones(NUMEL))

    def send():
        torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)

    witnessed(comm_mode, None, send, profiler=False)
    assert sent(comm_mode) == [("all_reduce", "float32", NBYTES, NBYTES)] * 2


def redistribute(comm_mode, mesh, dtype, **options):
    data = torch.ones(NUMEL, 2).to(dtype)
    local = Quantized(data, torch.ones(1))
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    witnessed(
        comm_mode,
        None,
        lambda: sharded.redistribute(mesh, [Replicate()]).to_local(),
        profiler=False,
        **options,
    )


@gloo_and_fake(2)
def test_quantized_dtensor_has_size_of_inner_tensors(comm_mode, device_mesh):
    # Gloo sends no float8; of its numbers with one byte, int8.
    redistribute(comm_mode, device_mesh(), torch.int8)
    assert sent(comm_mode) == [("all_gather", "int8", 2 * NUMEL, 4 * NUMEL)]
    (event,) = comm_mode.events
    assert event.source.value == "dtensor"
    # The scale is part of the tensor, though it is not sent.
    (redistribution,) = comm_mode.recording.redistributions
    assert redistribution.nbytes == 2 * NUMEL + 4


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_in_a_dtensor_is_recorded_as_float8(comm_mode, device_mesh, dtype):
    redistribute(comm_mode, device_mesh(), dtype)
    name = str(dtype).removeprefix("torch.")
    assert sent(comm_mode) == [("all_gather", name, 2 * NUMEL, 4 * NUMEL)]


@gloo_and_fake(2)
def test_unwaited_result_is_not_a_second_call(comm_mode, device_mesh):
    mesh = device_mesh()
    world = dist.group.WORLD

    def send():
        reduced = funcol.all_reduce(torch.ones(NUMEL), "sum", world)
        assert isinstance(reduced, funcol.AsyncCollectiveTensor)
        gathered = funcol.all_gather_tensor(reduced, 0, world)
        nested = TwoTensor(gathered, funcol.all_reduce(gathered, "sum", world))
        funcol.all_reduce(nested, "sum", world)
        DTensor.from_local(gathered, mesh, [Shard(0)], run_check=False).full_tensor()

    witnessed(comm_mode, None, send, profiler=False)
    assert sent(comm_mode) == [
        ("all_reduce", "float32", NBYTES, NBYTES),
        ("all_gather", "float32", NBYTES, 2 * NBYTES),
        *[("all_reduce", "float32", 2 * NBYTES, 2 * NBYTES)] * 3,
        ("all_gather", "float32", 2 * NBYTES, 4 * NBYTES),
    ]


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("is_mode_on", [True, False], ids=["inside its mode", "outside of it"])
@pytest.mark.parametrize("is_entered_first", [True, False], ids=["mode first", "mode last"])
def test_fake_tensors_are_recorded_as_plain_ones(comm_mode, is_mode_on, is_entered_first):
    fake = FakeTensorMode()
    with fake:
        tensor = torch.ones(NUMEL)

    def send():
        # Not funcol's wrapper, which waits for a tensor that fake mode did not see.
        dist.all_reduce(tensor)
        torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)

    if not is_mode_on:
        with comm_mode:
            send()
    elif is_entered_first:
        with fake, comm_mode:
            send()
    else:
        with comm_mode, fake:
            send()
    assert sent(comm_mode) == [("all_reduce", "float32", NBYTES, NBYTES)] * 2
