"""Changes that send the same bytes, of which some lose overlap; tensors are on a simulated GPU.

A case is a function of `changed` that returns a model and its step, as in `table.py`, or None for
`base`. Unless it says otherwise, the model has four layers, each a unit, and a head in the root's.
Then nothing can hide the gathers of the root and of `layers.0` in forward, nor their
reduce-scatters in backward. Layer i hides the gather of layer i + 1 in forward, and in backward the
gather of layer i - 1 and the reduce-scatter of layer i + 1.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812  # the usual name of this module

from pytest_fsdp_comm.text.words import show_count

WIDTH, LAYERS, BATCH, RANKS = 64, 4, 16, 64
LAYER_NBYTES = 4 * 2 * WIDTH**2
"""Two products in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A change that loses overlap, or makes the host wait without a loss."""

    build: Callable
    thread: str
    """A thread about such a loss, or about the overlap that it defeats, below
    `https://github.com/`; empty if none is known."""
    exposes: Mapping[str, tuple[str, ...]]
    """The owners of the calls that are exposed now, keyed by phase and kind; derived by hand."""
    first: tuple[str, ...]
    """The first printed statements, derived by hand."""


LOSSES: dict[str, Loss] = {}
INNOCENT: dict[str, Callable] = {}


def loss(*first, thread="", **exposes):
    """Add a loss, named as its function; `exposes` has keys such as ``forward_all_gather``."""

    def add(build):
        assert build.__name__ not in LOSSES, build.__name__
        exposed = {key.replace("_", " ", 1): tuple(owners) for key, owners in exposes.items()}
        LOSSES[build.__name__] = Loss(build=build, thread=thread, exposes=exposed, first=first)
        return build

    return add


def innocent(build):
    """Add a change that neither loses overlap nor makes the host wait, named as its function."""
    assert build.__name__ not in INNOCENT, build.__name__
    INNOCENT[build.__name__] = build
    return build


def mesh(**axes):
    return _mesh(dist.group.WORLD, tuple((axes or {"dp": RANKS}).items()))


@cache
def _mesh(_group, sizes):
    names, lengths = zip(*sizes, strict=True)
    return init_device_mesh("cuda", lengths, mesh_dim_names=names)


def product(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs, bias=False)


class Layer(nn.Module):
    """Two products; `before` and `after` are called with what they take and give."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.up, self.down = product(), product()
        self.before, self.after = before, after

    def forward(self, x):
        if self.before is not None:
            x = _replaced(x, self.before(x))
        x = x + self.down(self.up(x).relu())
        return x if self.after is None else _replaced(x, self.after(x))


def _replaced(x, result):
    return result if isinstance(result, torch.Tensor) and result.shape == x.shape else x


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = product()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain(**hooks):
    return Model(Layer(**hooks) for _ in range(LAYERS)).to("cuda")


def units(model, axes=None, **options):
    """Make each layer a unit, and the rest of the model another."""
    axes = mesh() if axes is None else axes
    for layer in model.layers:
        fully_shard(layer, mesh=axes, **options)
    return fully_shard(model, mesh=axes, **options)


def batch(size=BATCH, **options):
    return torch.randn(size, WIDTH, device="cuda", **options)


def train(model, size=BATCH):
    result = model(batch(size)).square().mean()
    result.backward()
    return result


def of(model, run=train):
    return model, lambda: run(model)


def base():
    """Return what many cases change: the model, and a forward and backward."""
    return of(units(plain()))


def names(*numbers):
    return tuple(f"layers.{number}" for number in numbers)


LATER = names(1, 2, 3)


def lost(calls, owners, phase, count=3, nbytes=None):
    """Return the line of calls that can no longer be hidden."""
    size = (count * LAYER_NBYTES if nbytes is None else nbytes) / 1024
    return (
        f"{calls} of {owners} in {phase} can no longer be hidden: {show_count(count, 'call')}, "
        f"{size:.1f} KiB per rank"
    )


GATHERS = lost("gathers", "layers.{1..3}", "forward")


def waits(way, owners="layers.{0..3}", phase="forward"):
    """Return the line of the likely cause."""
    return f"likely: the host now waits for the GPU: {owners} in {phase} ({way})"


def only_waits(way, often="4 times", owners="layers.{0..3}", phase="in forward"):
    return (
        f"{owners} {phase}: the host now waits for the GPU {often} ({way}), which exposes no call"
    )


AT_ONCE = "likely: the calls are waited for at once"
OUTSIDE = {"owners": "(no-module)", "phase": "outside forward and backward"}


# Reads at the end of a layer: the host issues the next gather when nothing is left to hide it.


def after_each(after, changed):
    return of(units(plain(after=after))) if changed else None


@loss(
    GATHERS,
    waits("copy_to_host"),
    thread="deepspeedai/DeepSpeed/pull/5578",
    forward_all_gather=LATER,
)
def copy_of_a_mean_to_the_host_in_each_layer(changed):
    return after_each(lambda x: x.detach().mean().cpu(), changed)


@loss(GATHERS, waits("item"), thread="meta-pytorch/torchtune/pull/522", forward_all_gather=LATER)
def item_of_a_loss_in_each_layer(changed):
    return after_each(lambda x: x.square().mean().item(), changed)


@loss(
    GATHERS, waits("item"), thread="huggingface/transformers/pull/44069", forward_all_gather=LATER
)
def check_for_overflow_in_each_layer(changed):
    def clamp(x):
        return x.clamp(-1e4, 1e4) if torch.isinf(x).any() else x

    return after_each(clamp, changed)


@loss(GATHERS, waits("item"), forward_all_gather=LATER)
def norm_logged_in_a_forward_hook(changed):
    if not changed:
        return None
    model, lines = plain(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: lines.append(f"{args[-1].norm():.3f}"))
    return of(units(model))


@loss(GATHERS, waits("item"), forward_all_gather=LATER)
def norm_printed_in_a_forward_hook(changed):
    if not changed:
        return None
    model, log = plain(), io.StringIO()
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: print(args[-1].norm(), file=log))
    return of(units(model))


@loss(GATHERS, waits("synchronize"), thread="pytorch/torchtitan/pull/134", forward_all_gather=LATER)
def timer_synchronizes_around_each_layer(changed):
    def wait(_):
        torch.cuda.synchronize()

    return of(units(plain(before=wait, after=wait))) if changed else None


@loss(GATHERS, waits("synchronize"), forward_all_gather=LATER)
def timer_waits_for_its_event_in_each_layer(changed):
    def read(_):
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()

    return after_each(read, changed)


@loss(
    GATHERS,
    waits("boolean_index"),
    thread="jingyaogong/minimind/issues/835",
    forward_all_gather=LATER,
)
def boolean_mask_in_each_layer(changed):
    keep = torch.arange(BATCH, device="cuda") < BATCH // 2

    def select(x):
        return x[keep].sum() if changed else x.where(keep[:, None], 0).sum()

    return of(units(plain(after=select)))


@loss(GATHERS, waits("nonzero"), thread="jingyaogong/minimind/issues/835", forward_all_gather=LATER)
def nonzero_in_each_layer(changed):
    keep = torch.arange(BATCH, device="cuda") < BATCH // 2
    return after_each(lambda x: x.index_select(0, keep.nonzero().flatten()), changed)


@loss(
    GATHERS,
    waits("repeat_interleave"),
    thread="pytorch/torchtitan/pull/3274",
    forward_all_gather=LATER,
)
def repeat_interleave_counts_in_each_layer(changed):
    def spread(x):
        repeats = torch.ones(BATCH, dtype=torch.int64, device="cuda")
        return x.repeat_interleave(repeats, 0, output_size=None if changed else BATCH)

    return of(units(plain(after=spread)))


@loss(GATHERS, waits("item"), forward_all_gather=LATER)
def one_hot_counts_classes_in_each_layer(changed):
    def route(_):
        experts = torch.arange(8, device="cuda")
        if changed:
            F.one_hot(experts)
        else:
            F.one_hot(experts, 8)

    return of(units(plain(after=route)))


@loss(GATHERS, waits("copy_to_device"), forward_all_gather=LATER)
def table_copied_to_the_gpu_in_each_layer(changed):
    table = torch.randn(WIDTH)

    def add(x):
        return x + table.to("cuda", non_blocking=not changed)

    return of(units(plain(after=add)))


@loss(
    GATHERS,
    "layers.{0..3} in forward, each: barrier[dp] 0 -> 1 (+1)",
    waits("barrier"),
    forward_all_gather=LATER,
    forward_barrier=names(0, 1, 2, 3),
)
def barrier_in_each_layer(changed):
    return after_each(lambda _: dist.barrier(), changed)


# Reads elsewhere in a layer, or between passes: products that follow the read hide the next gather.


@loss(only_waits("item"), thread="mosaicml/llm-foundry/pull/880")
def padding_read_at_the_start_of_each_layer(changed):
    lengths = torch.full((2,), BATCH // 2, device="cuda")

    def unpad(_):
        lengths.max().item() if changed else lengths.max()

    return of(units(plain(before=unpad)))


@loss(only_waits("copy_to_device"))
def mask_copied_at_the_start_of_each_layer(changed):
    mask = torch.ones(BATCH, 1)
    return of(units(plain(before=lambda x: x * mask.to("cuda", non_blocking=not changed))))


@loss(only_waits("item", phase="in backward"))
def norm_of_gradients_logged_by_tensor_hooks(changed):
    # FSDP gathers layer i - 1 after the hook on the output of layer i, and layer i follows.
    norms = []

    def watch(x):
        x.register_hook(lambda grad: norms.append(grad.norm().item() if changed else grad.norm()))

    return of(units(plain(after=watch)))


@loss(only_waits("item", "2 times", **OUTSIDE), thread="meta-pytorch/torchtune/pull/522")
def loss_read_after_each_micro_batch(changed):
    losses = []

    def run(model):
        for _ in range(2):
            result = train(model).detach()
            losses.append(result.item() if changed else result)

    return of(units(plain()), run)


@loss(only_waits("item", "once", "(no-module)", "in the optimizer phase"))
def gradients_checked_while_clipping(changed):
    def run(model):
        train(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=changed)

    return of(units(plain()), run)


@loss(only_waits("barrier", "2 times", **OUTSIDE), outside_barrier=(None, None))
def barrier_after_each_micro_batch(changed):
    def run(model):
        for _ in range(2):
            train(model)
            if changed:
                dist.barrier()

    return of(units(plain()), run)


SAVING = "head, layers.{0..3}, layers.{0..3}.down"
"""Each product saves its input and its weight, except the first one's weight; relu its result."""


@loss(
    only_waits("copy_to_device", "22 times", f"{SAVING} and 2 more", "in backward"),
    only_waits("copy_to_host", "21 times", f"{SAVING} and 1 more"),
    only_waits("copy_to_host", "once", **OUTSIDE),
    thread="meta-llama/llama-cookbook/pull/115",
)
def saved_activations_copied_at_once(changed):
    # Each copy is issued before the product that saves its input, so a product follows the last.
    def run(model):
        with torch.autograd.graph.save_on_cpu() if changed else torch.enable_grad():
            train(model)

    return of(units(plain()), run)


# Reads in backward.

REDUCED = lost("reduce_scatter[dp]", "layers.{1..3}", "backward")
EACH = "(root), layers.{0..3}"


@loss(
    REDUCED,
    waits("copy_to_host", EACH, "backward"),
    thread="facebookresearch/fairscale/pull/729",
    backward_reduce_scatter=LATER,
)
def gradients_copied_to_the_host_in_hooks(changed):
    # The hook runs behind the reduce-scatter, before the next layer's backward is issued.
    return hooked(units(plain()), lambda grad: grad.to("cpu", non_blocking=not changed))


def hooked(model, use):
    kept = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: kept.append(use(parameter.grad.to_local()))
        )
    return of(model)


@loss(
    lost("reduce_scatter[shard]", "layers.{1..3}", "backward"),
    waits("item", EACH, "backward"),
    thread="pytorch/pytorch/pull/106080",
    backward_reduce_scatter=LATER,
    backward_all_reduce=LATER,
)
def replicated_gradients_read_in_hooks(changed):
    model = units(plain(), mesh(replicate=8, shard=8))
    return hooked(model, lambda grad: grad.sum().item() if changed else grad.sum())


@loss(REDUCED, waits("copy_to_host", EACH, "backward"), backward_reduce_scatter=LATER)
def offloaded_gradients_set_to_zero(changed):
    # Gradients that exist are added to on the host, which copies each of them at once.
    model = units(Model(Layer() for _ in range(LAYERS)), offload_policy=CPUOffloadPolicy())
    train(model)

    def run(model):
        model.zero_grad(set_to_none=not changed)
        train(model)

    return of(model, run)


# Prefetching.


def listed(model, *, forward=True):
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        if forward:
            layer.set_modules_to_forward_prefetch([following])
    return model


@loss(
    GATHERS,
    "likely: less forward prefetching (set_modules_to_forward_prefetch; FSDP1: forward_prefetch)",
    thread="pytorch/torchtitan/pull/1581",
    forward_all_gather=LATER,
)
def prefetch_lists_removed_from_layers_that_read(changed):
    return of(listed(units(plain(after=lambda x: x.mean().item())), forward=not changed))


@loss(
    lost("gathers", "layers.{0..2}", "backward"),
    "likely: less backward prefetching (set_modules_to_backward_prefetch; FSDP1: "
    "backward_prefetch)",
    thread="pytorch/pytorch/pull/69282",
    backward_all_gather=names(0, 1, 2),
    backward_reduce_scatter=LATER,
)
def backward_prefetch_removed(changed):
    # A gather that waits for its turn follows the reduce-scatter before: both use one communicator.
    model = units(plain())
    for unit in (model, *model.layers) if changed else ():
        unit.set_modules_to_backward_prefetch([unit])
    return of(model)


@loss(GATHERS, thread="pytorch/pytorch/pull/128138", forward_all_gather=LATER)
def next_layer_unsharded_on_the_current_stream(changed):
    model = units(plain())
    if not changed:
        return of(listed(model))
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.register_forward_pre_hook(lambda *_, unit=following: unit.unshard() and None)
    return of(model)


# Collectives of user code.


@loss(
    lost(
        "all_reduce[world]",
        "head, layers.{0..3}.down, layers.{1..3}.up",
        "backward",
        8,
        8 * LAYER_NBYTES / 2,
    ),
    AT_ONCE,
    backward_all_reduce=(
        "head",
        "layers.0.down",
        *(f"{layer}.{name}" for layer in LATER for name in ("up", "down")),
    ),
)
def buckets_waited_for_in_gradient_hooks(changed):
    model, works, group = plain(), [], mesh().get_group()

    def reduce(parameter):
        work = dist.all_reduce(parameter.grad, group=group, async_op=True)
        if changed:
            work.wait()
        else:
            works.append(work)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    def run(model):
        train(model)
        while works:
            works.pop().wait()

    return of(model, run)


class Streamed(nn.Module):
    """Gathers the weight of the next product while one runs, without FSDP."""

    def __init__(self, *, waits_at_once):
        super().__init__()
        self.shards = nn.ParameterList(torch.randn(1, WIDTH) for _ in range(LAYERS))
        self.waits_at_once = waits_at_once

    def gather(self, number):
        whole = torch.empty(RANKS, WIDTH, device="cuda")
        shard = self.shards[number].detach()
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        if self.waits_at_once:
            work.wait()
        return whole, work

    def forward(self, x):
        following = self.gather(0)
        for number in range(LAYERS):
            weight, work = following
            work.wait()
            if number + 1 < LAYERS:
                following = self.gather(number + 1)
            x = x @ weight
        return x


@loss(
    lost("some gathers", "shards", "forward", 3, 3 * 4 * RANKS * WIDTH),
    AT_ONCE,
    thread="hpcaitech/ColossalAI/pull/5898",
    forward_all_gather=("shards",) * 3,
)
def gathers_of_user_code_waited_for_at_once(changed):
    return of(Streamed(waits_at_once=changed).to("cuda"), lambda model: model(batch()))


class ColumnProduct(torch.autograd.Function):
    """A product whose input's gradient is summed over ranks beside the weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight, group, waits_at_once):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.waits_at_once = group, waits_at_once
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_input = grad @ weight
        work = dist.all_reduce(of_input, group=ctx.group, async_op=True)
        if ctx.waits_at_once:
            work.wait()
        of_weight = grad.t() @ x
        work.wait()
        return of_input, of_weight, None, None


class GatheredProduct(torch.autograd.Function):
    """A product whose input is gathered again in backward, beside the input's gradient."""

    @staticmethod
    def forward(ctx, x, weight, group, is_async):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.is_async = group, is_async
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = torch.empty(8 * x.shape[0], x.shape[1], device="cuda")
        work = dist.all_gather_into_tensor(whole, x, group=ctx.group, async_op=ctx.is_async)
        of_input = grad @ weight
        if ctx.is_async:
            work.wait()
        return of_input, grad.repeat(8, 1).t() @ whole, None, None


class Products(nn.Module):
    """Tensor-parallel products written by hand, one for each layer."""

    def __init__(self, function, *args):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS))
        self.function, self.args = function, args

    def forward(self, x):
        for weight in self.weights:
            x = self.function.apply(x, weight, *self.args)
        return x


def tensor_parallel(function, option):
    model = Products(function, mesh(dp=8, tp=8)["tp"].get_group(), option).to("cuda")
    return of(model, lambda model: model(batch(requires_grad=True)).sum().backward())


@loss(
    lost("all_reduce[tp]", "(root)", "backward", 4, 4 * 4 * BATCH * WIDTH),
    AT_ONCE,
    thread="NVIDIA/apex/pull/1297",
    backward_all_reduce=("",) * LAYERS,
)
def tensor_parallel_gradients_waited_for_at_once(changed):
    return tensor_parallel(ColumnProduct, changed)


@loss(
    lost("all_gather[tp]", "(root)", "backward", 4, 8 * 4 * 4 * BATCH * WIDTH),
    "(root) in backward: all_gather[tp] now synchronous: the caller waits for it",
    thread="hpcaitech/ColossalAI/pull/4401",
    backward_all_gather=("",) * LAYERS,
)
def tensor_parallel_gathers_made_synchronous(changed):
    return tensor_parallel(GatheredProduct, not changed)


class Ring(nn.Module):
    """Attention to keys that travel around a ring of ranks, a block at a time."""

    def __init__(self, *, waits_at_once):
        super().__init__()
        self.query = product()
        self.waits_at_once = waits_at_once

    def forward(self, x):
        query, keys, rank = self.query(x), x, dist.get_rank()
        ring = [*range(rank // 4 * 4, rank // 4 * 4 + 4)]
        to, source = ring[(rank + 1) % 4], ring[(rank - 1) % 4]
        total = torch.zeros_like(query)
        for number in range(4):
            works = []
            if number < 3:
                received = torch.empty_like(keys)
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, keys, to),
                        dist.P2POp(dist.irecv, received, source),
                    ]
                )
            for work in works if self.waits_at_once else ():
                work.wait()
            total = total + (query @ keys.t()).softmax(-1) @ keys
            for work in works:
                work.wait()
            keys = received
        return total


@loss(
    lost("send[world]", "(root)", "forward", 3, 3 * 4 * BATCH * WIDTH),
    lost("recv[world]", "(root)", "forward", 3, 3 * 4 * BATCH * WIDTH),
    thread="NVIDIA/physicsnemo/pull/1543",
    forward_send=("",) * 3,
    forward_recv=("",) * 3,
)
def ring_of_keys_waited_for_before_attention(changed):
    return of(Ring(waits_at_once=changed).to("cuda"), lambda model: model(batch()))


class Experts(nn.Module):
    """A routed expert behind two all-to-alls, and a shared one."""

    def __init__(self, place):
        super().__init__()
        self.expert, self.shared = product(), product()
        self.place, self.side = place, torch.cuda.Stream()
        self.group = mesh(dp=8, ep=8)["ep"].get_group()

    def exchange(self, x):
        return all_to_all_single_autograd(x, None, None, self.group)

    def forward(self, x):
        current = torch.cuda.current_stream()
        if self.place == "beside":
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                shared = self.shared(x)
        if self.place == "before":
            shared = self.shared(x)
        tokens = self.exchange(x)
        if self.place == "in dispatch":
            shared = self.shared(x)
        tokens = self.exchange(self.expert(tokens)) * 2
        if self.place == "beside":
            current.wait_stream(self.side)
        if self.place == "after":
            shared = self.shared(x)
        return shared + tokens


def experts(place):
    model = Experts(place).to("cuda")
    return of(model, lambda model: model(batch(64, requires_grad=True)).sum().backward())


EXCHANGES = [
    lost("all_to_all[ep]", "(root)", phase, 2, 2 * 4 * RANKS * WIDTH)
    for phase in ("forward", "backward")
]
BOTH = {"forward_all_to_all": ("", ""), "backward_all_to_all": ("", "")}


@loss(*EXCHANGES, **BOTH)
def shared_expert_moved_behind_its_dispatch(changed):
    return experts("after" if changed else "beside")


@loss(*EXCHANGES, thread="NVIDIA-NeMo/Automodel/pull/3109", **BOTH)
def shared_expert_moved_to_the_main_stream(changed):
    return experts("before" if changed else "beside")


@loss(
    lost("some all_to_all[ep]", "(root)", "forward", 1, 4 * RANKS * WIDTH), forward_all_to_all=("",)
)
def shared_expert_moved_out_of_the_dispatch(changed):
    return experts("after" if changed else "in dispatch")


class Sparse(Layer):
    """A layer whose tokens are counted by expert, and may be read by the host."""

    def __init__(self, *, reads, place):
        super().__init__()
        self.router = product(WIDTH, RANKS)
        self.reads, self.place = reads, place

    def count(self, x):
        chosen = self.router(x).topk(2, dim=-1).indices
        counts = torch.histc(chosen.flatten(), bins=RANKS, min=0, max=RANKS)
        return counts.tolist() if self.reads else counts

    def forward(self, x):
        if self.place == "before":
            self.count(x)
        x = super().forward(x)
        if self.place == "after":
            self.count(x)
        return x


def sparse(**options):
    return of(units(Model(Sparse(**options) for _ in range(LAYERS)).to("cuda")))


@loss(only_waits("tolist"), thread="pytorch/torchtitan/issues/1968")
def tokens_per_expert_read_before_the_experts(changed):
    return sparse(reads=changed, place="before")


@loss(
    lost("gathers", "layers.{1..3}", "forward", 3, 3 * (LAYER_NBYTES + 4 * RANKS * WIDTH)),
    waits("tolist"),
    thread="deepspeedai/DeepSpeed/pull/5578",
    forward_all_gather=LATER,
)
def tokens_per_expert_read_after_the_experts(changed):
    return sparse(reads=changed, place="after")


# Innocent changes.


def act(model, activation):
    for layer in model.layers:
        layer.up = nn.Sequential(layer.up, activation)
    return model


class Blocks(nn.Module):
    """The model with another name for its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = product()

    def forward(self, x):
        return self.head(self.blocks(x))


@innocent
def layers_renamed(changed):
    if not changed:
        return None
    model = Blocks().to("cuda")
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh())
    return of(fully_shard(model, mesh=mesh()))


class Renamed(nn.Module):
    """A layer with other names for its products."""

    def __init__(self):
        super().__init__()
        self.first, self.second = product(), product()

    def forward(self, x):
        return x + self.second(self.first(x).relu())


@innocent
def products_renamed(changed):
    if not changed:
        return None
    return of(units(Model(Renamed() for _ in range(LAYERS)).to("cuda")))


@innocent
def batch_doubled(changed):
    return of(units(plain()), lambda model: train(model, 2 * BATCH)) if changed else None


@innocent
def sequence_of_another_length(changed):
    def run(model):
        model(torch.randn(2, 16 if changed else 8, WIDTH, device="cuda")).mean().backward()

    return of(units(plain()), run)


@innocent
def parameters_in_bfloat16(changed):
    dtype = torch.bfloat16 if changed else torch.float32

    def run(model):
        model(batch(dtype=dtype)).mean().backward()

    return of(units(plain().to(dtype)), run)


@innocent
def mixed_precision_of_units(changed):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return of(units(plain(), mp_policy=policy)) if changed else None


@innocent
def autocast_without_a_scaler(changed):
    def run(model):
        with torch.autocast("cuda", torch.bfloat16, enabled=changed):
            result = model(batch()).square().mean()
        result.backward()

    return of(units(plain()), run)


@innocent
def layers_compiled(changed):
    if not changed:
        return None
    model = plain()
    for layer in model.layers:
        layer.compile(backend="eager")
    return of(units(model))


@innocent
def activations_recomputed(changed):
    if not changed:
        return None
    model = plain()
    model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    return of(units(model))


class Attention(nn.Module):
    def __init__(self, *, is_fused):
        super().__init__()
        self.is_fused = is_fused
        if is_fused:
            self.qkv = product(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (product() for _ in range(3))

    def forward(self, x):
        queries, keys, values = self.qkv(x).chunk(3, -1) if self.is_fused else self.split(x)
        heads = (tensor.view(1, BATCH, 4, -1).transpose(1, 2) for tensor in (queries, keys, values))
        return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(BATCH, WIDTH)

    def split(self, x):
        return self.q(x), self.k(x), self.v(x)


@innocent
def query_key_value_fused(changed):
    return of(units(Model(Attention(is_fused=changed) for _ in range(LAYERS)).to("cuda")))


class Gated(nn.Module):
    """Two products that do not depend on each other, in either order."""

    def __init__(self, *, is_gate_first):
        super().__init__()
        self.gate, self.up = product(), product()
        self.is_gate_first = is_gate_first

    def forward(self, x):
        if self.is_gate_first:
            gate = self.gate(x)
            return x + gate.sigmoid() * self.up(x)
        up = self.up(x)
        return x + self.gate(x).sigmoid() * up


@innocent
def independent_products_reordered(changed):
    return of(units(Model(Gated(is_gate_first=changed) for _ in range(LAYERS)).to("cuda")))


@innocent
def shapes_logged_in_each_layer(changed):
    lines = []

    def log(x):
        lines.append(f"{tuple(x.shape)} {x.dtype} {x.device} {x.numel()} {x.requires_grad}")

    return after_each(log, changed)


@innocent
def hooks_that_read_shapes(changed):
    if not changed:
        return None
    model, shapes = plain(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: shapes.append(args[-1].shape))
        layer.register_full_backward_hook(lambda *args: shapes.append(args[-1][0].shape))
    return of(units(model))


@innocent
def metrics_kept_on_the_gpu(changed):
    kept = []
    return after_each(lambda x: kept.append(x.detach().square().mean()), changed)


@innocent
def metrics_averaged_on_the_gpu(changed):
    average = torch.zeros((), device="cuda")

    def update(x):
        average.mul_(0.9).add_(x.detach().abs().mean(), alpha=0.1)

    return after_each(update, changed)


@innocent
def metrics_copied_without_blocking(changed):
    kept = []
    return after_each(
        lambda x: kept.append(x.detach().mean().to("cpu", non_blocking=True)), changed
    )


@innocent
def padding_masked_by_where(changed):
    keep = (torch.arange(BATCH, device="cuda") < BATCH // 2)[:, None]
    return after_each(lambda x: x.where(keep, 0), changed)


@innocent
def padding_filled(changed):
    drop = (torch.arange(BATCH, device="cuda") >= BATCH // 2)[:, None]
    return after_each(lambda x: x.masked_fill(drop, 0.0), changed)


@innocent
def rows_selected_by_numbers(changed):
    numbers = torch.arange(BATCH - 1, -1, -1, device="cuda")
    return after_each(lambda x: x[numbers], changed)


@innocent
def rows_repeated_with_output_size(changed):
    repeats = torch.ones(BATCH, dtype=torch.int64, device="cuda")
    return after_each(lambda x: x.repeat_interleave(repeats, 0, output_size=BATCH), changed)


@innocent
def overflow_clamped_without_a_check(changed):
    return after_each(lambda x: x.nan_to_num().clamp(-1e4, 1e4), changed)


@innocent
def dropout_added(changed):
    return of(units(act(plain(), nn.Dropout(0.1) if changed else nn.Identity())))


@innocent
def activation_replaced(changed):
    return of(units(act(plain(), nn.GELU() if changed else nn.SiLU())))


@innocent
def norm_added(changed):
    if not changed:
        return None
    model = plain()
    for layer in model.layers:
        layer.up = nn.Sequential(nn.LayerNorm(WIDTH), layer.up).to("cuda")
    return of(units(model))


@innocent
def weights_initialized_differently(changed):
    if not changed:
        return None
    model = plain()
    for layer in model.layers:
        nn.init.trunc_normal_(layer.up.weight, std=0.02)
        nn.init.zeros_(layer.down.weight)
    return of(units(model))


@innocent
def biases_added(changed):
    if not changed:
        return None
    model = plain()
    for layer in model.layers:
        layer.up = nn.Linear(WIDTH, WIDTH, device="cuda")
    return of(units(model))


class Tied(Model):
    def __init__(self, *, is_tied):
        super().__init__(Layer() for _ in range(LAYERS))
        self.embed = nn.Embedding(WIDTH, WIDTH)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return super().forward(self.embed(x))


@innocent
def head_tied_to_the_embedding(changed):
    def run(model):
        model(torch.arange(BATCH, device="cuda")).mean().backward()

    return of(units(Tied(is_tied=changed).to("cuda")), run)


@innocent
def gradients_clipped(changed):
    def run(model):
        train(model)
        if changed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return of(units(plain()), run)


def optimized(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def run(model):
        train(model)
        optimizer.step()
        optimizer.zero_grad()

    return of(model, run)


@innocent
def optimizer_with_foreach(changed):
    return optimized(units(plain()), foreach=changed)


@innocent
def optimizer_fused(changed):
    return optimized(units(plain()), **({"fused": True} if changed else {"foreach": True}))


@innocent
def learning_rate_scheduled(changed):
    model = units(plain())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def run(model):
        train(model)
        optimizer.step()
        if changed:
            scheduler.step()
            scheduler.get_last_lr()

    return of(model, run)


@innocent
def gradients_set_to_none(changed):
    def run(model):
        train(model)
        model.zero_grad(set_to_none=changed)

    return of(units(plain()), run)


@innocent
def local_shards_averaged(changed):
    model = units(plain())
    shards = [parameter.to_local().detach().clone() for parameter in model.parameters()]

    def run(model):
        train(model)
        for average, parameter in zip(shards, model.parameters(), strict=True):
            if changed:
                average.lerp_(parameter.to_local().detach(), 0.1)

    return of(model, run)


@innocent
def batches_copied_from_pinned_memory(changed):
    def run(model):
        x = torch.randn(BATCH, WIDTH).pin_memory().to("cuda", non_blocking=True)
        model(x if changed else batch()).mean().backward()

    return of(units(plain()), run)


@innocent
def batches_of_a_data_loader(changed):
    loader = torch.utils.data.DataLoader(torch.randn(BATCH, WIDTH), batch_size=BATCH, shuffle=True)

    def run(model):
        for x in loader if changed else [torch.randn(BATCH, WIDTH)]:
            model(x.to("cuda", non_blocking=True)).mean().backward()

    return of(units(plain()), run)


@innocent
def labels_read_on_the_host(changed):
    labels = torch.arange(BATCH)

    def run(model):
        if changed:
            assert labels.max().item() == labels.tolist()[-1] == BATCH - 1
        train(model)

    return of(units(plain()), run)


@innocent
def evaluated_before_the_step(changed):
    def run(model):
        if changed:
            with torch.no_grad():
                model(batch())
        train(model)

    return of(units(plain()), run)


@innocent
def micro_batches_reduced_together(changed):
    def run(model):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1 or not changed)
            train(model)

    return of(units(plain()), run)


@innocent
def more_micro_batches(changed):
    def run(model):
        for _ in range(4 if changed else 2):
            train(model)

    return of(units(plain()), run)


@innocent
def layers_in_a_sequence(changed):
    if not changed:
        return None
    model = plain()
    model.layers = nn.Sequential(*model.layers)
    model.forward = lambda x: model.head(model.layers(x))
    return of(units(model))


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@innocent
def model_wrapped(changed):
    return of(Wrapper(units(plain()))) if changed else None


@innocent
def layers_wrapped(changed):
    if not changed:
        return None
    model = plain()
    model.layers = nn.ModuleList(Wrapper(layer) for layer in model.layers)
    return of(units(model))


@innocent
def auxiliary_head_detached(changed):
    return after_each(lambda x: x.detach().square().sum(), changed)


@innocent
def loss_in_float32(changed):
    def run(model):
        result = model(batch())
        (result.to(torch.float64) if changed else result).mean().backward()

    return of(units(plain()), run)


@innocent
def loss_of_another_kind(changed):
    target = torch.zeros(BATCH, dtype=torch.int64, device="cuda")

    def run(model):
        result = model(batch())
        (F.cross_entropy(result, target) if changed else result.square().mean()).backward()

    return of(units(plain()), run)


@innocent
def layer_twice_as_wide(changed):
    if not changed:
        return None
    model = plain()
    for layer in model.layers:
        layer.up = product(WIDTH, 2 * WIDTH).to("cuda")
        layer.down = product(2 * WIDTH, WIDTH).to("cuda")
    return of(units(model))


@innocent
def layer_added(changed):
    return of(units(Model(Layer() for _ in range(LAYERS + 1)).to("cuda"))) if changed else None


@innocent
def gradients_copied_without_blocking(changed):
    model, kept = units(plain()), []
    for parameter in model.parameters() if changed else ():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: kept.append(parameter.grad.to_local().to("cpu", non_blocking=True))
        )
    return of(model)


@innocent
def event_recorded_in_each_layer(changed):
    events = []
    return after_each(lambda _: events.append(torch.cuda.current_stream().record_event()), changed)


@innocent
def random_seed_set(changed):
    def run(model):
        if changed:
            torch.manual_seed(1)
            torch.cuda.manual_seed_all(1)
        train(model)

    return of(units(plain()), run)


@innocent
def memory_read_in_each_layer(changed):
    return after_each(lambda _: torch.cuda.max_memory_allocated(), changed)


@innocent
def replicas_in_another_ratio(changed):
    return of(
        units(plain(), mesh(replicate=4, shard=16) if changed else mesh(replicate=8, shard=8))
    )


@innocent
def layers_not_resharded(changed):
    return of(units(plain(), reshard_after_forward=False)) if changed else None
