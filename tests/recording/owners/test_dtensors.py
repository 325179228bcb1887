"""DTensors that are sent by hand: each has the module and the role of its parameter.

On gloo ranks. A line is ``phase owner role kind nbytes``, in the order of issue; ``-`` is no
module, ``?`` no role.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from models import FLOAT, LINEAR_NBYTES, WIDTH, Block, Model, TokenModel, shard, step
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pytest_fsdp_comm.recording.owners.tensors import TensorOwners

pytestmark = pytest.mark.distributed(world_size=2)

NAMES = ["embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]


def lines(comm_mode):
    return [
        f"{event.phase.value} {'-' if event.owner is None else event.owner or '.'} "
        f"{event.role.value if event.role else '?'} {event.kind} {event.nbytes}"
        for event in comm_mode.events
    ]


def simple_fsdp(model, mesh, *, dtype=None, placements=None):
    """Shards each parameter, and gathers it wherever forward reads it (as torchtitan's)."""
    for module in list(model.modules()):
        names = [name for name, own in module._parameters.items() if own is not None]
        for name in names:
            whole = module._parameters[name].data
            sharded = distribute_tensor(whole, mesh, placements or [Shard(0)])
            module._parameters[name] = nn.Parameter(sharded)
        if names:
            whole = [Replicate()] * mesh.ndim
            means = [Partial("avg")] * mesh.ndim

            def gather(module, name, whole=whole, means=means):
                own = module._parameters[name]
                own = own if dtype is None else own.to(dtype)
                return own.redistribute(placements=whole).to_local(grad_placements=means)

            read = {
                name: property(lambda module, name=name: gather(module, name)) for name in names
            }
            module.__class__ = type("Gathering", (module.__class__,), read)
    return model


def sent_of(comm_mode, model, send):
    with comm_mode(model):
        send()
    return lines(comm_mode)


def gathers(nbytes=LINEAR_NBYTES, names=NAMES, phase="forward"):
    return [f"{phase} {name} parameters all_gather {nbytes}" for name in names]


def reductions(nbytes=LINEAR_NBYTES, names=NAMES):
    return [f"backward {name} gradients reduce_scatter {nbytes}" for name in reversed(names)]


@pytest.mark.upstream
def test_simple_fsdp_roles(comm_mode, device_mesh):
    model = simple_fsdp(Model(), device_mesh())
    assert sent_of(comm_mode, model, lambda: step(model)) == [*gathers(), *reductions()]


def test_a_cast_copy_is_its_parameter(comm_mode, device_mesh):
    model = simple_fsdp(Model(), device_mesh(), dtype=torch.bfloat16)
    x, half = torch.randn(2, WIDTH, dtype=torch.bfloat16), LINEAR_NBYTES // 2
    found = sent_of(comm_mode, model, lambda: model(x).sum().backward())
    assert found == [*gathers(half), *reductions(half)]


def test_a_recomputation_gathers_parameters_again(comm_mode, device_mesh):
    model = simple_fsdp(Model(reentrant=False), device_mesh())
    assert sent_of(comm_mode, model, lambda: step(model)) == [
        *gathers(),
        *reductions(names=["head"]),
        *gathers(names=NAMES[3:5], phase="recompute"),
        *reductions(names=NAMES[3:5]),
        *gathers(names=NAMES[1:3], phase="recompute"),
        *reductions(names=NAMES[1:3]),
        *reductions(names=["embed"]),
    ]


def running_graphs(backward):
    return aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            running_graphs(lambda graph, _: graph), id="graph as it is", marks=pytest.mark.release
        ),
        pytest.param(
            running_graphs(lambda graph, _: fx.GraphModule(graph, graph.graph)), id="another graph"
        ),
    ],
)
def test_compiled_code_roles(comm_mode, device_mesh, backend):
    model = simple_fsdp(Model(), device_mesh())
    compiled = torch.compile(model, backend=backend)
    step(compiled)
    model.zero_grad()
    found = sent_of(comm_mode, model, lambda: step(compiled))
    assert sorted(found) == sorted([*gathers(), *reductions()])
    if backend == "aot_eager":
        assert {event.issued_in for event in comm_mode.events} == {""}


def test_compiled_gradients_are_named_before_reuse(comm_mode, device_mesh):
    model = simple_fsdp(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled)
    optimizer.zero_grad()
    with comm_mode(model):
        for _ in range(2):
            step(compiled)
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(lines(comm_mode)) == sorted(2 * [*gathers(), *reductions()])


def test_adamw_and_clipping_carry_no_parameter(comm_mode, device_mesh):
    model = simple_fsdp(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with comm_mode(model):
        for _ in range(2):
            step(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = [line for line in lines(comm_mode) if not line.startswith("optimizer")]
    assert found == 2 * [*gathers(), *reductions()]
    norms = [line for line in lines(comm_mode) if line.startswith("optimizer")]
    assert norms == 2 * [f"optimizer - ? all_reduce {len(NAMES) * FLOAT}"]


@pytest.mark.distributed(world_size=4)
def test_dtensor_hsdp_reduces_over_both_axes(comm_mode, device_mesh):
    mesh = device_mesh(replicate=2, shard=2)
    model = simple_fsdp(Model(), mesh, placements=[Replicate(), Shard(0)])
    with comm_mode(model):
        step(model)
    assert {event.axis for event in comm_mode.events} == {"replicate", "shard"}
    forward = [line for line in lines(comm_mode) if line.startswith("forward")]
    assert forward == gathers()
    assert {(e.owner, e.kind, e.role.value) for e in comm_mode.events if e.phase == "backward"} == {
        (name, kind, "gradients") for name in NAMES for kind in ("reduce_scatter", "all_reduce")
    }


def test_parameter_gathered_per_loss_chunk_is_named(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        losses = [model.head.weight.full_tensor().sum() for _ in range(3)]
        sum(losses).backward()
    assert lines(comm_mode) == [
        *3 * [f"outside head parameters all_gather {LINEAR_NBYTES}"]
        # Each copy is whole, and its gradient too: nothing is reduced.
    ]


def test_gradients_gathered_in_full_are_named(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        for _ in range(2):
            step(model)
            for parameter in model.parameters():
                parameter.grad.full_tensor()
            model.zero_grad()
    outside = [line for line in lines(comm_mode) if line.startswith("outside")]
    assert outside == 2 * [f"outside {name} gradients all_gather {LINEAR_NBYTES}" for name in NAMES]


def test_a_full_checkpoint_gathers_parameters(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    options = dcp.StateDictOptions(full_state_dict=True)

    def gather():
        dcp.get_state_dict(model, optimizer, options=options)

    # The first and second moments of the optimizer, which have no owner.
    moments = 12 * [f"outside - ? all_gather {LINEAR_NBYTES}"]
    assert sent_of(comm_mode, model, gather) == [*gathers(phase="outside"), *moments]


def test_a_tied_parameter_has_both_names(comm_mode, device_mesh):
    model = simple_fsdp(TokenModel(layers=0), device_mesh())
    model.head._parameters["weight"] = model.embed._parameters["weight"]
    with comm_mode(model):
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    nbytes = 16 * LINEAR_NBYTES // WIDTH
    assert sorted(set(lines(comm_mode))) == [
        f"backward embed+head gradients reduce_scatter {nbytes}",
        f"forward embed+head parameters all_gather {nbytes}",
    ]


class Adapted(nn.Module):
    """A frozen linear, and an adapter of rank 2."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_adapters_are_reduced_frozen_parameters_not(comm_mode, device_mesh):
    model = nn.Sequential(Adapted(), Adapted())
    simple_fsdp(model, device_mesh())
    for adapted in model:
        adapted.base._parameters["weight"].requires_grad_(requires_grad=False)
    with comm_mode(model):
        step(model)
    adapter = 2 * WIDTH * FLOAT
    assert lines(comm_mode) == [
        line
        for n in range(2)
        for line in (*gathers(names=[f"{n}.base"]), *gathers(adapter, names=[f"{n}.a", f"{n}.b"]))
    ] + reductions(adapter, names=["0.a", "0.b", "1.a", "1.b"])


def test_norm_gradients_reduced_in_optimizer_are_named(comm_mode, device_mesh):
    model = Block(norm=True)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, device_mesh(tp=2), plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with comm_mode(model):
        model(torch.randn(1, 4, WIDTH)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert {(e.owner, e.role) for e in comm_mode.events if e.phase != "optimizer"} == {
        ("up", "activations"),
        ("down", "activations"),
    }
    # Once by the norm, and twice by AdamW: for the first moment and, as one of two, the second.
    found = [line for line in lines(comm_mode) if "gradients" in line]
    assert set(found) == {f"optimizer norm gradients all_reduce {WIDTH * FLOAT}"}


class Muon(torch.optim.Optimizer):
    """Gathers what it makes of a gradient with momentum, in the way of `send`."""

    def __init__(self, parameters, send):
        super().__init__(parameters, {"lr": 0.1})
        self.send = send

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum"]
                momentum.mul_(0.9).add_(parameter.grad)
                update = self.send(parameter.grad, momentum)
                update = update / (update.norm() + 1e-7)
                for _ in range(2):
                    square = update @ update.T
                    update = 1.5 * update - 0.5 * square @ update
                whole = distribute_tensor(
                    update.to(parameter.dtype), parameter.device_mesh, src_data_rank=None
                )
                parameter.add_(whole.redistribute(placements=parameter.placements), alpha=-0.1)


def nesterov(gradient, momentum):
    return gradient.add(momentum, alpha=0.9).bfloat16().full_tensor()


def plain(_gradient, momentum):
    return momentum.full_tensor()


def by_hand(gradient, momentum):
    own = gradient.lerp(momentum, 0.9).to_local()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def together(gradient, momentum):
    return torch.stack([gradient.full_tensor(), momentum.full_tensor()]).mean(0)


@pytest.mark.parametrize(
    ("send", "sent"),
    [
        (nesterov, [f"- ? all_gather {LINEAR_NBYTES // 2}"]),
        (plain, [f"- ? all_gather {LINEAR_NBYTES}"]),
        (by_hand, [f"- ? all_gather {LINEAR_NBYTES}"]),
        (
            together,
            [f"NAME gradients all_gather {LINEAR_NBYTES}", f"- ? all_gather {LINEAR_NBYTES}"],
        ),
    ],
    ids=["nesterov", "plain", "by_hand", "together"],
)
def test_muon_names_gradients_alone(comm_mode, device_mesh, send, sent):
    model = simple_fsdp(Model(), device_mesh())
    optimizer = Muon(model.parameters(), send)
    with comm_mode(model):
        for _ in range(2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
    found = [line for line in lines(comm_mode) if line.startswith("optimizer")]
    assert found == 2 * [f"optimizer {one.replace('NAME', name)}" for name in NAMES for one in sent]


# Collectives that must not be attributed to a parameter.


def all_reduced(tensor):
    dist.all_reduce(tensor.contiguous())


def test_reused_storage_is_not_earlier_gradient(comm_mode):
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def send():
        step(model)
        all_reduced(model.weight.grad)
        address = model.weight.grad.untyped_storage()._cdata
        model.weight.grad = None
        others = []
        while len(others) < 1000 and address not in {o.untyped_storage()._cdata for o in others}:
            others.append(torch.randn(WIDTH, WIDTH))
        all_reduced(others[-1])

    assert sent_of(comm_mode, model, send) == [
        f"outside . gradients all_reduce {LINEAR_NBYTES}",
        f"outside - ? all_reduce {LINEAR_NBYTES}",
    ]


def test_a_gradient_that_was_given_away_is_no_gradient(comm_mode):
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def send():
        step(model)
        gradient = model.weight.grad
        all_reduced(gradient)
        model.zero_grad()
        all_reduced(gradient)

    assert sent_of(comm_mode, model, send)[1:] == [f"outside - ? all_reduce {LINEAR_NBYTES}"]


def test_an_expanded_parameter_is_an_activation(comm_mode):
    class Expanding(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, WIDTH))

        def forward(self, x):
            expanded = self.token.detach().expand(len(x), -1)
            torch.ops._c10d_functional.all_reduce(expanded, "sum", dist.group.WORLD.group_name)
            return x

    model = nn.Sequential(Expanding())
    found = sent_of(comm_mode, model, lambda: model(torch.ones(2, WIDTH)))
    assert found == [f"forward 0 activations all_reduce {2 * WIDTH * FLOAT}"]


def test_views_of_a_flat_buffer_are_told_apart(comm_mode):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    flat = torch.zeros(3 * WIDTH * WIDTH)
    parts = flat.view(3, WIDTH, WIDTH)
    for linear, part in zip(model, parts, strict=False):
        linear.weight.data = part

    def send():
        all_reduced(parts[0])
        all_reduced(parts[1, 1:3])
        all_reduced(parts[2])
        all_reduced(parts[:2])
        all_reduced(parts[0:3:2])

    assert sent_of(comm_mode, model, send) == [
        f"outside 0 parameters all_reduce {LINEAR_NBYTES}",
        f"outside 1 parameters all_reduce {LINEAR_NBYTES // 4}",
        # Beside the parameters, in their storage, and over several of them.
        f"outside - ? all_reduce {LINEAR_NBYTES}",
        f"outside - ? all_reduce {2 * LINEAR_NBYTES}",
        f"outside - ? all_reduce {2 * LINEAR_NBYTES}",
    ]


def test_a_parameter_of_another_model_has_no_owner(comm_mode, device_mesh):
    model, teacher = (simple_fsdp(Model(), device_mesh()) for _ in range(2))

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = model

        def forward(self, x):
            return self.student(x) @ teacher.head._parameters["weight"].full_tensor()

    outer = Distilled()
    found = sent_of(comm_mode, outer, lambda: outer(torch.ones(2, WIDTH)))
    assert found == [
        *gathers(names=[f"student.{name}" for name in NAMES]),
        f"forward - parameters all_gather {LINEAR_NBYTES}",
    ]


def test_a_copy_without_a_graph_is_unknown(comm_mode, device_mesh):
    model = simple_fsdp(Model(), device_mesh(), dtype=torch.bfloat16)

    @torch.no_grad()
    def send():
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16))
        model.head._parameters["weight"].clone().full_tensor()

    assert sent_of(comm_mode, model, send) == [
        *(f"forward - ? all_gather {LINEAR_NBYTES // 2}" for _ in NAMES),
        f"outside - ? all_gather {LINEAR_NBYTES}",
    ]


def test_activation_shaped_as_weight_is_activation(comm_mode, device_mesh):
    mesh = device_mesh(tp=2)

    class Gathering(nn.Linear):
        def forward(self, x):
            return DTensor.from_local(super().forward(x), mesh, [Shard(0)]).full_tensor()

    model = nn.Sequential(Gathering(WIDTH, WIDTH, bias=False))
    found = sent_of(comm_mode, model, lambda: model(torch.ones(WIDTH // 2, WIDTH)))
    assert found == [f"forward 0 activations all_gather {LINEAR_NBYTES}"]


def test_the_gradient_of_an_input_is_an_activation(comm_mode, device_mesh):
    mesh = device_mesh(tp=2)

    class Gathering(nn.Module):
        def forward(self, x):
            return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])

    model = nn.Sequential(Gathering())
    x = torch.ones(WIDTH // 2, WIDTH, requires_grad=True)

    def send():
        partial = model(x).to_local(grad_placements=[Partial()])
        partial.sum().backward()

    assert sent_of(comm_mode, model, send) == [
        f"forward 0 activations all_gather {LINEAR_NBYTES}",
        f"backward 0 activations reduce_scatter {LINEAR_NBYTES}",
    ]


def test_a_result_that_becomes_no_gradient_is_unknown(comm_mode):
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def send():
        for _ in range(2):
            step(model)
            gathered = [torch.zeros(WIDTH, WIDTH) for _ in range(2)]
            dist.all_gather(gathered, torch.ones(WIDTH, WIDTH))
            # Only reductions produce gradients, so a gather does not count as this one.
            model.weight.grad = gathered[0]
        summed = torch.ones(WIDTH, WIDTH)
        dist.all_reduce(summed)
        model.weight.grad = summed

    assert sent_of(comm_mode, model, send) == [
        f"outside - ? all_gather {2 * LINEAR_NBYTES}",
        f"outside - ? all_gather {2 * LINEAR_NBYTES}",
        f"outside . gradients all_reduce {LINEAR_NBYTES}",
    ]


def test_hook_gathering_or_averaging_is_attributed(comm_mode, device_mesh):
    model = simple_fsdp(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), device_mesh())

    def send(parameter):
        all_reduced(parameter.to_local())
        parameter.full_tensor()
        all_reduced(parameter.grad.to_local())
        parameter.grad.full_tensor()

    model[0]._parameters["weight"].register_post_accumulate_grad_hook(send)
    own, whole = LINEAR_NBYTES // 2, LINEAR_NBYTES
    assert sent_of(comm_mode, model, lambda: step(model))[2:] == [
        f"backward 0 parameters all_reduce {own}",
        f"backward 0 parameters all_gather {whole}",
        f"backward 0 gradients all_reduce {own}",
        f"backward 0 gradients all_gather {whole}",
    ]


@pytest.mark.parametrize("replicated", [False, True])
def test_units_alone_cause_no_look_up(comm_mode, device_mesh, monkeypatch, replicated):
    if replicated:
        model = nn.parallel.DistributedDataParallel(Model())
    else:
        model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())

    def run():
        step(model)
        optimizer.step()
        optimizer.zero_grad()

    run()
    for looking in ("_find_label_by_storage", "_rebuild_label_table"):
        monkeypatch.delattr(TensorOwners, looking)
    with comm_mode(model):
        run()
    assert {event.source.value for event in comm_mode.events} == {"ddp" if replicated else "fsdp"}


def test_a_lazy_module_has_no_parameter_yet(comm_mode):
    class Sending(nn.Module):
        def forward(self, x):
            dist.all_reduce(x)
            return x

    model = nn.Sequential(Sending(), nn.LazyLinear(WIDTH, bias=False))

    def send():
        step(model)
        all_reduced(model[1].weight.grad)

    assert sent_of(comm_mode, model, send) == [
        f"forward 0 activations all_reduce {2 * WIDTH * FLOAT}",
        f"outside 1 gradients all_reduce {LINEAR_NBYTES}",
    ]
