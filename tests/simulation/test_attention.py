"""Attention of code for GPUs runs the kernels that a GPU would, and sends what they would."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

cp = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used as it is")

simulated = pytest.mark.distributed(world_size=8, simulate=True)
HALF, FULL = torch.bfloat16, torch.float32
SEQUENCE = 128  # of a rank
LOCAL = (1, 4, SEQUENCE, 32)
NUMEL = 4 * SEQUENCE * 32
SIZE = 4


class Kernels(TorchDispatchMode):
    """Notes which attention kernels run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._opname] if "attention" in func._opname else []
        return func(*args, **kwargs or {})


def heads(shape=LOCAL, dtype=HALF, *, requires_grad=True, device="cuda"):
    made = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return [own.requires_grad_(requires_grad) for own in made]


def sent(comm_mode):
    return [(one.phase, one.kind, one.nbytes) for one in comm_mode.recording.collectives]


@simulated
@pytest.mark.parametrize(
    ("backend", "dtype", "kernel"),
    [
        (None, HALF, "flash"),
        (None, FULL, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, HALF, "flash"),
        (SDPBackend.CUDNN_ATTENTION, HALF, "flash"),
        (SDPBackend.MATH, HALF, None),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_attention_runs_a_kernel_of_gpus(backend, dtype, kernel, is_sharded):
    given = own = heads(dtype=dtype)
    if is_sharded:
        mesh = init_device_mesh("cuda", (8,))
        own = [DTensor.from_local(each, mesh, [Shard(1)]) for each in given]
    chosen = sdpa_kernel(backend or [*SDPBackend.__members__.values()][1:4])
    with Kernels() as ran, chosen:
        result = nn.functional.scaled_dot_product_attention(*own, is_causal=kernel is not None)
        result.sum().backward()
    assert result.shape == own[0].shape
    assert result.device.type == "cuda"
    assert all(each.grad is not None for each in given)
    stem = f"_scaled_dot_product_{kernel}_attention"
    assert ran.names == ([stem, f"{stem}_backward"] if kernel else [])


@simulated
@pytest.mark.parametrize("mask_type", [torch.bool, HALF])
def test_masked_attention_runs_the_efficient_kernel(mask_type):
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda", dtype=mask_type)
    with Kernels() as ran:
        nn.functional.scaled_dot_product_attention(*heads(), mask).sum().backward()
    assert ran.names[0] == "_scaled_dot_product_efficient_attention"


@simulated
def test_attention_under_autocast_takes_its_dtype():
    with torch.autocast("cuda", HALF):
        query, key, value = heads(dtype=FULL)
        result = nn.functional.scaled_dot_product_attention(query, key, value.to(HALF))
    assert result.dtype == HALF


@simulated
def test_attention_on_the_cpu_stays_as_it_is():
    query, key, value = heads(device="cpu")
    with Kernels() as ran:
        nn.functional.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)
        nn.functional.scaled_dot_product_attention(query, key, value)
    assert set(ran.names) <= {"_scaled_dot_product_flash_attention_for_cpu"}


# Each rank has keys and values of NUMEL elements each. They go around the ring of SIZE ranks in
# SIZE - 1 calls, or are gathered in one; in backward again, and the gradients of both, in float32,
# in SIZE calls: back to where they belong after the last.
GRADIENTS = [("all_to_all", 2 * NUMEL * 4)] * SIZE


def ring(rotate, dtype):
    nbytes = 2 * NUMEL * dtype.itemsize
    return (
        [("all_gather", SIZE * nbytes)]
        if rotate == "allgather"
        else [("all_to_all", nbytes)] * (SIZE - 1)
    )


@simulated
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_context_parallel_sends_its_ring(comm_mode, rotate, dtype):
    mesh = init_device_mesh("cuda", (SIZE, 2), mesh_dim_names=("cp", "dp"))["cp"]
    cp.set_rotate_method(rotate)
    tokens = torch.arange(SIZE * SEQUENCE, device="cuda").view(1, -1)
    with comm_mode, context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        assert tokens.shape == (1, SEQUENCE)
        own = heads(dtype=dtype)
        result = nn.functional.scaled_dot_product_attention(*own, is_causal=True)
        result.sum().backward()
    assert tokens.tolist() == [[*range(SIZE * SEQUENCE)]]
    calls = [(kind, nbytes) for _, kind, nbytes in sent(comm_mode)]
    assert sorted(calls) == sorted(2 * ring(rotate, dtype) + GRADIENTS)
    assert calls[: len(ring(rotate, dtype))] == ring(rotate, dtype)


class Attention(nn.Module):
    def forward(self, query, key, value, block_mask=None):
        return flex_attention(query, key, value, block_mask=block_mask)


def causal(_batch, _head, query, key):
    return query >= key


@simulated
def test_context_parallel_flex_attention_gathers(comm_mode):
    """A custom operator sends, of which torch otherwise runs the function without memory."""
    mesh = init_device_mesh("cuda", (SIZE, 2), mesh_dim_names=("cp", "dp"))["cp"]
    kind = cp._ContextParallel.AttentionType.FLEX
    model = parallelize_module(Attention(), mesh, cp._ContextParallel(2, kind))
    mask = create_block_mask(causal, 1, 1, SIZE * SEQUENCE, SIZE * SEQUENCE, device="cuda")
    (mask,) = cp._context_parallel_shard(mesh, [mask], [2])
    for _ in range(2):
        own = heads()
        with comm_mode(model):
            model(*own, block_mask=mask).sum().backward()
        assert sent(comm_mode) == [
            *[("forward", "all_gather", SIZE * NUMEL * 2)] * 2,
            *[("backward", "reduce_scatter", SIZE * NUMEL * 2)] * 2,
        ]


@pytest.mark.filterwarnings("error")
@simulated
@pytest.mark.parametrize("is_grouped", [False, True])
def test_flex_attention_has_a_backward_on_cuda(is_grouped):
    bias = nn.Parameter(torch.randn(4, device="cuda"))
    query, key, value = heads()
    if is_grouped:
        key, value = (own.detach()[:, :2].requires_grad_() for own in (key, value))
    result = flex_attention(
        query, key, value, lambda score, _b, head, _q, _k: score + bias[head], enable_gqa=is_grouped
    )
    assert (result.shape, result.dtype) == (query.shape, HALF)
    result.sum().backward()
    assert [own.grad.shape for own in (query, key, value, bias)] == [
        own.shape for own in (query, key, value, bias)
    ]


@simulated
def test_flex_attention_on_the_cpu_has_no_backward():
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*heads(device="cpu"))
