"""Who owns each collective, where it is issued, in which phase: a truth table made by hand.

Each line is ``phase owner kind < issued_in``, in the order of issue. ``.`` is the root, ``-`` no
module. The fake group is enough, since `test_fsdp2` shows that gloo sends the same.
"""

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Model, shard, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


def table(comm_mode):
    def shown(name):
        return "-" if name is None else name or "."

    return [
        f"{event.phase.value} {shown(event.owner)} {event.kind} < {shown(event.issued_in)}"
        for event in comm_mode.events
    ]


fake = pytest.mark.distributed(world_size=4, backend="fake")

FORWARD = [
    "forward . all_gather < .",
    "forward layers.0 all_gather < layers.0",
    "forward layers.1 all_gather < layers.1",
]
# The root does not reshard after forward. Its pre-backward hook prefetches nothing but the last
# block, and each block's hook prefetches the one before it.
BACKWARD_GATHERS = ["backward layers.1 all_gather < .", "backward layers.0 all_gather < layers.1"]
REDUCES = [
    "backward layers.1 reduce_scatter < layers.1",
    "backward layers.0 reduce_scatter < layers.0",
    "backward . reduce_scatter < .",
]
STEP = [*FORWARD, *BACKWARD_GATHERS, *REDUCES]


@fake
def test_bare_mode_names_from_outermost_module(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode:
        step(nn.Sequential(model))
    assert table(comm_mode)[:2] == [
        "forward 0 all_gather < 0",
        "forward 0.layers.0 all_gather < 0.layers.0",
    ]


@fake
def test_fsdp_names_units_if_only_backward_runs(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    loss = model(torch.randn(2, WIDTH)).sum()
    with comm_mode:
        loss.backward()
    # No module runs, and FSDP knows its root.
    assert table(comm_mode) == [*BACKWARD_GATHERS, *REDUCES]
    assert [event.module for event in comm_mode.reshards] == [
        "layers.1",
        "layers.0",
        "layers.1",
        "layers.0",
        "",
    ]


@fake
def test_backward_only_block_has_earlier_names(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    outer = nn.Sequential(model)
    with comm_mode:
        loss = outer(torch.randn(2, WIDTH)).sum()
    with comm_mode:
        loss.backward()
    assert table(comm_mode)[0] == "backward 0.layers.1 all_gather < 0"


@fake
def test_unit_outside_passed_model_is_not_root(comm_mode, device_mesh):
    model, other = (shard(Model(blocks=1), device_mesh()) for _ in range(2))
    loss = other(torch.randn(2, WIDTH)).sum()
    with comm_mode(model):
        model(torch.randn(2, WIDTH))
        loss.backward()
    assert [event.module for event in comm_mode.reshards] == [
        "",
        "layers.0",
        "layers.0",
        None,
        None,
        None,
    ]
    rows = [(row.owner, row.what, row.count) for row in comm_mode.profile.rows]
    assert (None, "reshard", 2) in rows


@fake
def test_a_unit_of_a_model_that_never_ran_has_no_name(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode:
        model.layers[0].unshard()
    assert table(comm_mode) == ["outside - all_gather < -"]
    assert [event.module for event in comm_mode.reshards] == [None]


@fake
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_no_collective(comm_mode, device_mesh, reentrant):
    # FSDP gathers before the recomputation, in its pre-backward hook: the recomputed forward finds
    # the parameters there.
    model = shard(Model(reentrant=reentrant), device_mesh())
    with comm_mode(model):
        step(model, grad_input=True)
    assert table(comm_mode) == STEP


class Reducing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        # Before what backward needs: a recomputation stops as soon as it has that.
        dist.all_reduce(x.detach().clone())
        return self.linear(x)


@fake
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_collectives_have_their_own_phase(comm_mode, reentrant):
    model = nn.Sequential(Reducing(), Reducing())
    with comm_mode(model):
        x = torch.randn(2, WIDTH, requires_grad=True)
        for part in model:
            x = checkpoint(part, x, use_reentrant=reentrant)
        x.sum().backward()
    # No outermost call of the model itself: the parts are named relative to the given model.
    assert table(comm_mode) == [
        "forward 0 all_reduce < 0",
        "forward 1 all_reduce < 1",
        "recompute 1 all_reduce < 1",
        "recompute 0 all_reduce < 0",
    ]


@fake
def test_without_root_backward_gathers_no_unit(comm_mode, device_mesh):
    # Each block is a root of its own, and roots do not reshard after forward.
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh())
    with comm_mode(model):
        step(model)
    assert table(comm_mode) == [*FORWARD[1:], *REDUCES[:2]]


@fake
def test_a_unit_of_two_modules_is_named_after_both(comm_mode, device_mesh):
    model = Model()
    fully_shard([model.layers[0], model.layers[1]], mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())
    # Also where backward runs alone.
    loss = model(torch.randn(2, WIDTH)).sum()
    with comm_mode:
        loss.backward()
    assert {event.owner for event in comm_mode.events} == {"", "layers.0+layers.1"}
    with comm_mode(model):
        step(model)
    assert table(comm_mode) == [
        "forward . all_gather < .",
        "forward layers.0+layers.1 all_gather < layers.0",
        "backward layers.0+layers.1 all_gather < .",
        "backward layers.0+layers.1 reduce_scatter < layers.0",
        "backward . reduce_scatter < .",
    ]


@fake
def test_node_of_pre_hook_belongs_to_its_module(comm_mode, device_mesh):
    # Colwise redistributes its input in a forward pre-hook: the node whose backward all-reduces is
    # made there, before the first operation of `up`.
    model = Model()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, device_mesh(tp=4), plan)
    with comm_mode(model):
        step(model, grad_input=True)
    assert table(comm_mode) == [
        "forward layers.0.down all_reduce < layers.0.down",
        "forward layers.1.down all_reduce < layers.1.down",
        "backward layers.1.up all_reduce < layers.1.up",
        "backward layers.0.up all_reduce < layers.0.up",
    ]
    moves = [
        (move.phase.value, move.owner, move.source_placements, move.target_placements)
        for move in comm_mode.redistributions
    ]
    partial, replicate = ("Partial(sum)",), ("Replicate()",)
    assert [(phase, owner) for phase, owner, *_ in moves] == [
        ("forward", "layers.0.down"),
        ("forward", "layers.1.down"),
        ("backward", "layers.1.up"),
        ("backward", "layers.0.up"),
    ]
    assert {(source, target) for *_, source, target in moves} == {(partial, replicate)}


@fake
@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_is_optimizer_phase_norm_is_not(comm_mode, device_mesh, foreach):
    # As torchtitan does, which sums the norms of pipeline stages in between.
    model = shard(Model(), device_mesh())
    step(model)
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    with comm_mode(model):
        nn.utils.get_total_norm(gradients, foreach=foreach)
        # Computing a norm without clipping is not the optimizer's phase.
        partial = torch.linalg.vector_norm(gradients[0])
        partial.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, 1.0, partial, foreach=foreach)
    assert table(comm_mode) == [
        "optimizer - all_reduce < -",
        "outside - all_reduce < -",
        "optimizer - all_reduce < -",
    ]


@fake
def test_call_outside_all_phases_is_outside(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        model.head.weight.full_tensor()
        model.layers[0].unshard()
    assert table(comm_mode) == ["outside head all_gather < -", "outside layers.0 all_gather < -"]


@fake
def test_an_exception_in_the_middle_leaves_torch_clean(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())

    def fail_after_forward():
        with comm_mode(model):
            model(torch.randn(2, WIDTH))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_forward()
    assert table(comm_mode) == FORWARD
    fresh = shard(Model(), device_mesh())
    with comm_mode(fresh):
        step(fresh)
    assert table(comm_mode) == STEP


@fake
def test_each_unit_is_resharded_after_it_was_gathered(comm_mode, device_mesh):
    model = shard(Model(blocks=1), device_mesh())
    with comm_mode(model):
        step(model)
    nbytes = 2 * WIDTH * WIDTH * 4
    assert [(e.phase.value, e.module, e.action, e.nbytes) for e in comm_mode.reshards] == [
        ("forward", "", "unshard", nbytes),
        ("forward", "layers.0", "unshard", nbytes),
        ("forward", "layers.0", "reshard", nbytes),
        ("backward", "layers.0", "unshard", nbytes),
        ("backward", "layers.0", "reshard", nbytes),
        ("backward", "", "reshard", nbytes),
    ]
    assert comm_mode.timings.keys() == {
        *("all", "all_gather", "all_gather_object", "reduce", "resharding")
    }
    assert comm_mode.timings["resharding"] > 0
    assert comm_mode.timings["all"] > comm_mode.timings["all_gather"] > 0
    # One sequence over all sorts of events: a unit is resharded after it was gathered.
    order = sorted([*comm_mode.events, *comm_mode.reshards], key=lambda event: event.index)
    assert [event.index for event in order] == list(range(len(order)))


# As in Lightning, and with LBFGS.
@fake
def test_optimizer_closure_is_forward_and_backward(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())

    def log_head(*_):
        model.head.weight.full_tensor()

    def closure():
        step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(log_head)
    with comm_mode(model):
        optimizer.step(closure)
    gathered, *steps, clipped = table(comm_mode)
    assert steps == STEP
    assert gathered == "optimizer head all_gather < -"
    assert clipped == "optimizer - all_reduce < -"


@pytest.mark.distributed(world_size=2)
def test_phases_of_plain_collectives_in_a_closure(comm_mode):
    class Averaged(nn.Linear):
        def forward(self, x):
            dist.all_reduce(torch.ones(1))
            return super().forward(x)

    model = Averaged(WIDTH, WIDTH)
    model.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))

    def closure():
        dist.barrier()
        model(torch.randn(2, WIDTH)).sum().backward()

    with comm_mode(model):
        torch.optim.SGD(model.parameters()).step(closure)
    assert table(comm_mode) == [
        "optimizer - barrier < -",
        "forward . all_reduce < .",
        "backward . all_reduce < .",
    ]


@pytest.mark.distributed(world_size=2)
def test_a_step_in_backward_is_the_optimizers(comm_mode):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: dist.barrier())
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with comm_mode(model):
        model(torch.randn(2, WIDTH)).sum().backward()
    assert [event.phase for event in comm_mode.events] == ["optimizer"]
