"""What can hide each collective of a simulated rank, derived by hand, and where the host waits."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812  # the usual name of this module
from torch_facts import SHOWS_ASYNC

from pytest_fsdp_comm import RecordingError

WIDTH, LAYERS, RANKS = 64, 6, 64
simulated = pytest.mark.distributed(world_size=RANKS, simulate=True)
on_gpu = pytest.mark.distributed(world_size=RANKS, simulate=True, device="cuda")


class Layer(nn.Module):
    def __init__(self, then=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.then = then

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).relu())
        if self.then is not None:
            self.then(x)
        return x


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(**kwargs) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.layers(x))


def shard(model, mesh, **kwargs):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def step(model, device="cpu"):
    x = torch.randn(8, WIDTH, device=device, requires_grad=True)
    model(x).square().mean().backward()


def unit_of(fqn):
    return re.sub(r"^(layers\.\d+|head).*", r"\1", fqn)


def hidden_by(comm_mode, kind, phase, axis=None):
    """Return the units beside each collective, keyed by owner."""
    events = [
        event
        for event in comm_mode.events
        if (event.kind, event.phase) == (kind, phase) and axis in {None, event.axis}
    ]
    assert all(event.exposed is not bool(event.beside) for event in events)
    return {event.owner: {unit_of(each.module) for each in event.beside} for event in events}


def exposed(comm_mode):
    return {
        (str(event.phase), event.kind, event.owner) for event in comm_mode.events if event.exposed
    }


def waits(comm_mode):
    """Return ``{(phase, owner, way): count}`` from the rows."""
    rows = comm_mode.profile.rows
    return {
        (str(row.phase), row.owner, row.what): row.count
        for row in rows
        if row.subject == "host_wait"
    }


def layers(*numbers):
    return {f"layers.{number}" for number in numbers}


FORWARD = {
    "": set(),
    "layers.0": set(),
    "layers.1": layers(0),
    **{f"layers.{i}": layers(i - 2, i - 1) for i in range(2, LAYERS)},
}
"""The copy of a gather frees the buffer of the gather before, so two gathers are under way."""
BACKWARD = {
    # The host is still ahead of the last layer's forward.
    f"layers.{LAYERS - 1}": layers(LAYERS - 1) | {"head"},
    **{f"layers.{i}": layers(i + 1) for i in range(LAYERS - 1)},
}
REDUCED = {"": set(), "layers.0": set(), **{f"layers.{i}": layers(i - 1) for i in range(1, LAYERS)}}
BARE = {
    *(("forward", "all_gather", owner) for owner in ("", "layers.0")),
    *(("backward", "reduce_scatter", owner) for owner in ("", "layers.0")),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@simulated
def test_fsdp_step_overlaps_with_neighbours(device, comm_mode):
    mesh = dist.device_mesh.init_device_mesh(device, (RANKS,), mesh_dim_names=("dp",))
    model = shard(Model().to(device), mesh)
    with comm_mode(model):
        step(model, device)
    assert hidden_by(comm_mode, "all_gather", "forward") == FORWARD
    assert hidden_by(comm_mode, "all_gather", "backward") == BACKWARD
    assert hidden_by(comm_mode, "reduce_scatter", "backward") == REDUCED
    assert waits(comm_mode) == {}


@simulated
def test_beside_counts_flops(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        step(model)
    product = 2 * 8 * WIDTH * WIDTH
    gather = next(event for event in comm_mode.events if event.owner == "layers.1")
    assert {each.module: each.flops for each in gather.beside} == {
        "layers.0.up": product,
        "layers.0.down": product,
    }
    # In backward, each layer has two products for each in forward.
    reduction = next(event for event in comm_mode.events if event.kind == "reduce_scatter")
    assert sum(each.flops for each in reduction.beside) == 4 * product


@simulated
def test_explicit_prefetch_reaches_two_layers(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    for i, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(model.layers[i + 1 : i + 3])
    with comm_mode(model):
        step(model)
    # Layer i gathers layer i + 2 before it computes, after the copy of layer i - 1.
    assert hidden_by(comm_mode, "all_gather", "forward") == {
        "": set(),
        **{f"layers.{i}": layers(*range(max(i - 3, 0), i)) for i in range(LAYERS)},
    }


@simulated
def test_no_backward_prefetch_exposes_backward(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    for unit in (model, *model.layers):
        unit.set_modules_to_backward_prefetch([unit])
    with comm_mode(model):
        step(model)
    gathers = hidden_by(comm_mode, "all_gather", "backward")
    # The head is not reduced before the last layer is gathered.
    assert gathers.pop(f"layers.{LAYERS - 1}")
    assert not any(gathers.values())
    assert not any(hidden_by(comm_mode, "reduce_scatter", "backward").values())


@simulated
def test_read_in_each_layer_exposes_gathers(device_mesh, comm_mode):
    model = shard(Model(then=lambda x: x.mean().item()), device_mesh())
    with comm_mode(model):
        step(model)
    assert not any(hidden_by(comm_mode, "all_gather", "forward").values())
    assert waits(comm_mode) == {("forward", f"layers.{i}", "item"): 1 for i in range(LAYERS)}
    wait = comm_mode.host_waits[0]
    assert (wait.way, wait.owner, wait.issued_in) == ("item", "layers.0", "layers.0")
    assert wait.call_site.startswith("tests/simulation/test_overlap.py:")


@simulated
def test_explicit_prefetch_survives_reads(device_mesh, comm_mode):
    model = shard(Model(then=lambda x: x.mean().item()), device_mesh())
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    with comm_mode(model):
        step(model)
    hidden = hidden_by(comm_mode, "all_gather", "forward")
    assert hidden == {
        "": set(),
        "layers.0": set(),
        **{f"layers.{i}": layers(i - 1) for i in range(1, LAYERS)},
    }


@simulated
def test_unshard_in_pre_hook_is_early_but_exposed(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    for layer, following in zip(model.layers, model.layers[1:], strict=False):
        layer.register_forward_pre_hook(lambda *_, unit=following: unit.unshard() and None)
    with comm_mode(model):
        step(model)
    gathers = [e for e in comm_mode.events if e.kind == "all_gather" and e.phase == "forward"]
    assert [event.ahead for event in gathers] == [0, 0, *[1] * (LAYERS - 1)]
    assert all(event.exposed for event in gathers)


@simulated
def test_read_between_micro_batches_only_waits(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    losses = []
    with comm_mode(model):
        for _ in range(2):
            loss = model(torch.randn(8, WIDTH, requires_grad=True)).mean()
            loss.backward()
            losses.append(loss.item())
    assert exposed(comm_mode) == BARE
    assert waits(comm_mode) == {("outside", None, "item"): 2}


@simulated
def test_hsdp_all_reduce_overlaps_all_later_layers(device_mesh, comm_mode):
    model = shard(Model(), device_mesh(replicate=8, shard=8))
    with comm_mode(model):
        step(model)
    assert hidden_by(comm_mode, "all_reduce", "backward") == {
        "": set(),
        **{f"layers.{i}": layers(*range(i)) for i in range(LAYERS)},
    }
    assert hidden_by(comm_mode, "reduce_scatter", "backward") == REDUCED


def offload(model, mesh):
    return shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@simulated
def test_offload_waits_for_each_gradient_if_accumulating(device, comm_mode):
    mesh = dist.device_mesh.init_device_mesh(device, (RANKS,), mesh_dim_names=("dp",))
    model = offload(Model(), mesh)
    with comm_mode(model):
        step(model, device)
    num_parameters = len([*model.layers[0].parameters()])
    # At the end of backward, the host waits for all copies to the host.
    assert waits(comm_mode) == {("backward", None, "synchronize"): LAYERS * num_parameters + 2}
    assert hidden_by(comm_mode, "reduce_scatter", "backward") == REDUCED
    with comm_mode(model):
        step(model, device)
    each = {("backward", f"layers.{i}", "copy_to_host"): num_parameters for i in range(LAYERS)}
    assert waits(comm_mode) == {**each, ("backward", "", "copy_to_host"): 2}
    assert not any(hidden_by(comm_mode, "reduce_scatter", "backward").values())


@simulated
def test_tensor_parallel_collectives_are_exposed(device_mesh, comm_mode):
    model = Model()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, device_mesh(dp=8, tp=8)["tp"], plan)
    with comm_mode(model):
        step(model)
    assert comm_mode.counts(axis="tp") == 2 * LAYERS
    assert comm_mode.counts(axis="tp", exposed=True) == 2 * LAYERS


@simulated
def test_two_reductions_of_one_gradient_are_exposed(device_mesh, comm_mode):
    # DTensor waits for each at once, before the other product.
    model = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "gate": nn.Linear(WIDTH, WIDTH)})
    plan = dict.fromkeys(model, ColwiseParallel())
    parallelize_module(model, device_mesh(dp=8, tp=8)["tp"], plan)
    with comm_mode:
        x = torch.randn(8, WIDTH, requires_grad=True)
        (model["up"](x) * model["gate"](x)).sum().backward()
    assert comm_mode.counts("all_reduce", phase="backward") == 2
    assert comm_mode.counts("all_reduce", phase="backward", exposed=False) == 0


@simulated
def test_sequence_parallel_collectives_are_exposed(device_mesh, comm_mode):
    model = Model()
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(layer, device_mesh(dp=8, tp=8)["tp"], plan)
    with comm_mode(model):
        model.layers[0].down(model.layers[0].up(model.layers[0].norm(torch.randn(8, WIDTH))))
    kinds = {event.kind for event in comm_mode.events if event.axis == "tp"}
    assert kinds == {"all_gather", "reduce_scatter"}
    assert comm_mode.counts(axis="tp", exposed=False) == 0


class Experts(nn.Module):
    """A shared expert beside a routed one, or before or after its all-to-alls."""

    def __init__(self, group, place):
        super().__init__()
        self.group, self.place = group, place
        self.expert, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def route(self, x):
        tokens = functional.all_to_all_single_autograd(x, None, None, self.group)
        return functional.all_to_all_single_autograd(self.expert(tokens), None, None, self.group)

    def forward(self, x):
        current = torch.cuda.current_stream()
        if self.place == "beside":
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                shared = self.shared(x)
            tokens = self.route(x) * 2
            current.wait_stream(self.side)
        else:
            shared = self.shared(x) if self.place == "before" else None
            tokens = self.route(x) * 2
            shared = self.shared(x) if shared is None else shared
        return shared + tokens


@on_gpu
@pytest.mark.parametrize(
    ("place", "hides"), [("beside", {"shared"}), ("before", set()), ("after", set())]
)
def test_shared_expert_hides_only_on_side_stream(place, hides, device_mesh, comm_mode):
    model = Experts(device_mesh().get_group(), place).to("cuda")
    with comm_mode(model):
        model(torch.randn(RANKS, WIDTH, device="cuda", requires_grad=True)).sum().backward()
    assert comm_mode.counts("all_to_all", phase="forward") == 2
    assert comm_mode.counts("all_to_all", phase="backward") == 2
    for event in comm_mode.events:
        assert {each.module for each in event.beside} == hides
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


@simulated
def test_independent_work_hides_functional_call(device_mesh, comm_mode):
    group, first, second = device_mesh().get_group(), nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(8, 8)
    with comm_mode:
        total = functional.all_reduce(x, "sum", group).view(64)
        first(x)
        total + 1
        second(x)
        functional.all_reduce(x, "sum", group).wait()
        first(x)
        result = functional.all_reduce(x, "sum", group)
        if isinstance(result, functional.AsyncCollectiveTensor):
            result = result.wait()
        assert not isinstance(result, functional.AsyncCollectiveTensor)
        first(x)
    assert [bool(event.beside) for event in comm_mode.events] == [True, False, False]
    assert sum(each.flops for each in comm_mode.events[0].beside) == 2 * 8**3


@simulated
@pytest.mark.parametrize("way", ["wait", "future", "value", "never"])
def test_work_is_waited_for(way, device_mesh, comm_mode):
    group, x = device_mesh().get_group(), torch.randn(8, 8)
    with comm_mode:
        work = dist.all_reduce(x, group=group, async_op=True)
        if way == "wait":
            work.wait()
        elif way != "never":
            future = work.get_future()
            future.wait() if way == "future" else future.value()
        x @ x
    (event,) = comm_mode.events
    assert event.exposed is (way != "never")


@simulated
@pytest.mark.parametrize("waits", [True, False])
def test_a_callback_waits_on_a_stream_of_its_own(waits, device_mesh, comm_mode):
    """As DDP's bf16_compress_hook, which casts the result back."""
    group, x = device_mesh().get_group(), torch.randn(8, 8)
    with comm_mode:
        work = dist.all_reduce(x, group=group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] * 2)
        if waits:
            future.wait()
        x @ x
        future.wait()
        x @ x
    (event,) = comm_mode.events
    assert event.exposed is waits
    assert sum(each.flops for each in event.beside) == (0 if waits else 2 * 8**3)


@simulated
def test_sends_of_two_pairs_run_in_parallel(comm_mode):
    x = torch.randn(8, 8)
    with comm_mode:
        first, second = dist.isend(x, 1), dist.isend(x, 2)
        third = dist.irecv(torch.empty(8), 1)
        x @ x
        second.wait()
        x @ x
        third.wait()
        x @ x
        first.wait()
    product = 2 * 8**3
    # The receive follows the send to the same rank, so it waits for it too.
    assert [sum(each.flops for each in e.beside) // product for e in comm_mode.events] == [2, 1, 2]


def read_bool(x):
    return 1 if x.sum() > 0 else 0


WAYS = {
    "item": lambda x: x.sum().item(),
    "item of a truth": read_bool,
    "item of a text": lambda x: str(x.mean()),
    "item of a formatted text": lambda x: f"{x.mean()}",
    "item of a number": lambda x: f"{x.mean():.2f}",
    "tolist": lambda x: torch.arange(4, device=x.device).tolist(),
    "nonzero": lambda x: torch.ones(4, device=x.device).bool().nonzero(),
    "masked_select": lambda x: torch.ones(4, device=x.device).masked_select(
        torch.arange(4, device=x.device) > 1
    ),
    "boolean_index": lambda x: x[0][torch.arange(WIDTH, device=x.device) > 1],
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(8, device=x.device).long(), 0),
    "unique": lambda x: torch.arange(4, device=x.device).unique(),
    "synchronize": lambda _: torch.cuda.synchronize(),
    "synchronize of a stream": lambda _: torch.cuda.current_stream().synchronize(),
    "synchronize of an event": lambda _: torch.cuda.current_stream().record_event().synchronize(),
    "barrier": lambda _: dist.barrier(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@simulated
def test_way_is_one_host_wait(way, device, comm_mode):
    x = torch.randn(8, WIDTH, device=device)
    with comm_mode:
        WAYS[way](x)
    assert waits(comm_mode) == {("outside", None, way.partition(" ")[0]): 1}


COPIES = {
    "copy_to_host": lambda x, _: x.cpu(),
    "copy_to_host by to": lambda x, _: x.to("cpu", torch.bfloat16),
    "copy_to_host by copy_": lambda x, host: host.copy_(x),
    "copy_to_device": lambda _, host: host.cuda(),
    "copy_to_device by to": lambda x, host: host.to(x),
    "copy_to_device by copy_": lambda x, host: x.copy_(host),
}


@pytest.mark.parametrize("way", COPIES)
@on_gpu
def test_blocking_copy_is_one_host_wait(way, comm_mode):
    x, host = torch.randn(8, device="cuda"), torch.randn(8)
    with comm_mode:
        COPIES[way](x, host)
    assert waits(comm_mode) == {("outside", None, way.partition(" ")[0]): 1}


@on_gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_saved_tensors_on_the_host_are_copied_twice(pin_memory, comm_mode):
    x = torch.randn(8, device="cuda", requires_grad=True)
    with comm_mode:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            y = x.sin()
        y.sum().backward()
    assert x.grad.is_cuda
    ways = [wait.way for wait in comm_mode.host_waits]
    assert ways == ([] if pin_memory else ["copy_to_host", "copy_to_device"])


@on_gpu
def test_innocent_operations_do_not_wait(comm_mode):
    x, host = torch.randn(8, WIDTH, device="cuda"), torch.arange(8)
    mask = torch.arange(WIDTH, device="cuda") > 1
    with comm_mode:
        x.to("cpu", non_blocking=True)
        host.to("cuda", non_blocking=True)
        x.copy_(x + 1)
        x.to(torch.bfloat16).to("cuda")
        host.tolist(), host.sum().item(), host.numpy(), host[host > 3]
        x[:, mask.long()], x.where(mask, 0), x.masked_fill(mask, 0)
        x[0][mask] = 3.0
        x.repeat_interleave(torch.ones(8, device="cuda").long(), 0, output_size=8)
        F.one_hot(torch.arange(8, device="cuda"), 8)
        F.cross_entropy(x, torch.arange(8, device="cuda"))
        str(x.shape), str(host)
        torch.cuda.current_stream().query()
    assert comm_mode.host_waits == ()


@simulated
def test_optimizer_steps_and_samplers_do_not_wait(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    with comm_mode(model):
        for batch in torch.utils.data.DataLoader(torch.arange(4), shuffle=True):
            step(model)
            optimizer.step()
            del batch
    assert comm_mode.host_waits == ()


@on_gpu
def test_clipping_waits_only_if_it_checks(device_mesh, comm_mode):
    model = shard(Model().to("cuda"), device_mesh())
    for checks in (False, True):
        with comm_mode(model):
            step(model, "cuda")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=checks)
        assert waits(comm_mode) == ({("optimizer", None, "item"): 1} if checks else {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@simulated
def test_grad_scaler_waits_before_its_step(device, comm_mode):
    model = nn.Linear(WIDTH, WIDTH).to(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device)
    with comm_mode(model):
        scaler.scale(model(torch.randn(8, WIDTH, device=device)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert waits(comm_mode) == {("outside", None, "item"): 1}


@on_gpu
def test_device_of_fixtures_is_cuda(device_mesh, dist_info):
    assert device_mesh().device_type == "cuda"
    assert torch.device(dist_info.device) == torch.device("cuda", 0)


@simulated
def test_streams_of_an_earlier_block_are_forgotten(comm_mode):
    side, x = torch.cuda.Stream(), torch.randn(8, 8)
    with comm_mode:
        with torch.cuda.stream(side):
            x @ x
        event = side.record_event()
    with comm_mode:
        event.wait()
        dist.all_reduce(x)
        with torch.cuda.stream(side):
            x @ x
    (call,) = comm_mode.events
    assert sum(each.flops for each in call.beside) == 2 * 8**3


@simulated
def test_copies_of_a_block_share_the_order(device_mesh, comm_mode):
    outer = copy.copy(comm_mode)
    model = shard(Model(), device_mesh())
    with outer(model), comm_mode(model):
        step(model)
    assert outer.profile == comm_mode.profile
    assert exposed(outer) == BARE


SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=64, simulate=True)
def test_step(device_mesh, comm_mode, comm_snapshot):
    model = fully_shard(nn.Linear(8, 64), mesh=device_mesh())
    with comm_mode(model):
        loss = model(torch.randn(2, 8)).sum()
        loss.backward()
        SPARE = 0
    assert comm_mode == comm_snapshot
"""


def test_snapshot_without_overlap_is_compared_until_updated(pytester):
    def run(source, *arguments):
        (pytester.path / "test_it.py").write_text(source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    changed = SOURCE.replace("SPARE = 0", "torch.ones(1).item()")
    run(SOURCE, "--snapshot-update").assert_outcomes(passed=1)
    file = pytester.path / "snapshots/test_it/test_step.ws64.comm"
    text = file.read_text()
    lines = text.splitlines()
    assert ("async unknown" in lines) is not SHOWS_ASYNC
    assert lines[5 - SHOWS_ASYNC :][:3] == [
        "overlap known",
        "forward (root) all_gather[dp] x1 of 2_304 B float32 parameters exposed",
        "forward (root) unshard x1",
    ]
    run(changed).assert_outcomes(failed=1)
    # A snapshot of real ranks does not know where the host waits.
    file.write_text(text.replace("overlap known\n", "").replace(" exposed", ""))
    run(changed).assert_outcomes(passed=1)
    run(SOURCE, "--snapshot-update").assert_outcomes(passed=1)
    assert file.read_text() == text


@pytest.mark.distributed(world_size=2, backend="fake")
def test_ranks_without_simulation_know_no_overlap(comm_mode):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode.events[0].exposed is None
    assert not comm_mode.profile.shows_overlap
    with pytest.raises(RecordingError, match=r"comm_mode\.host_waits needs a simulated rank"):
        assert comm_mode.host_waits
    with pytest.raises(RecordingError, match=r"counts\('all_reduce', exposed=True\) needs"):
        comm_mode.counts("all_reduce", exposed=True)


@simulated
def test_questions_select_exposed_calls(device_mesh, comm_mode):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        step(model)
        assert comm_mode.counts("all_gather", exposed=True) > 0
    gather = comm_mode.nbytes("all_gather", owner="layers.0", phase="forward")
    root = comm_mode.nbytes("all_gather", owner="", phase="forward")
    assert comm_mode.counts("all_gather", exposed=True) == 2
    assert comm_mode.nbytes("all_gather", exposed=True) == gather + root
    assert comm_mode.counts("all_gather", exposed=False) == 2 * LAYERS - 1
    assert sum(row.exposed_nbytes for row in comm_mode.profile.rows) == sum(
        comm_mode.nbytes(kind, exposed=True) for kind in ("all_gather", "reduce_scatter")
    )
