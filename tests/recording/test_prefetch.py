"""How far ahead of its use each unit is gathered, and how many bytes are gathered at once.

The distance of a gather is the slot of its use minus that of its issue. Distances and bytes are
counted by hand, for a root and four layers, in the order of issue. Distances of FSDP2 are also read
off torch's own labels.
"""

import pytest
import torch
from models import BLOCK_NBYTES, LINEAR_NBYTES, ROOT_NBYTES, WIDTH, Block, Model, shard, step
from oracle import gloo_and_fake, profiled_distances
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings

LAYERS = 4
LAYER, ROOT = BLOCK_NBYTES, ROOT_NBYTES
# In backward, the root, the layer that runs and the one that comes next.
USUAL = ROOT + 2 * LAYER
fake = pytest.mark.distributed(world_size=4, backend="fake", scope="module")
# torch itself warns of NO_SHARD, which is to be replaced by DDP.
no_shard = pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning")

FSDP2 = {}
FSDP1 = {}


def case(name, cases=FSDP2, *, peak=USUAL, **expected):
    """Adds a case: from a mesh, a model and its step; their peak and distances of each phase."""

    def added(arrange):
        cases[name] = (arrange, peak, expected)
        return arrange

    return added


def linear():
    return nn.Linear(WIDTH, WIDTH, bias=False)


def of(model, run=step):
    return model, lambda: run(model)


def layered(device_mesh, **options):
    return shard(Model(LAYERS), device_mesh(), **options)


def prefetching(device_mesh, forward=0, backward=0):
    """Each layer asks for as many of the next ones, and of those before."""
    model = layered(device_mesh)
    layers = list(model.layers)
    for n, layer in enumerate(layers):
        if forward:
            layer.set_modules_to_forward_prefetch(layers[n + 1 : n + 1 + forward])
        if backward:
            layer.set_modules_to_backward_prefetch(layers[max(0, n - backward) : n][::-1])
    return model


# Each layer is gathered when its forward begins. In backward each unit asks for the one before it,
# the root for the last layer; the root itself is not resharded in between.
@case("by default", forward="0 0 0 0 0", backward="1 1 1 1")
def default(device_mesh):
    return of(layered(device_mesh))


@case("over two axes", forward="0 0 0 0 0", backward="1 1 1 1")
def hybrid(device_mesh):
    return of(shard(Model(LAYERS), device_mesh(replicate=2, shard=2)))


@case("never resharded", peak=ROOT + LAYERS * LAYER, forward="0 0 0 0 0")
def never_resharded(device_mesh):
    return of(layered(device_mesh, reshard_after_forward=False))


@case("a resharded root", forward="0 0 0 0 0", backward="0 1 1 1 1")
def resharded_root(device_mesh):
    return of(layered(device_mesh, root=True))


# Half of each layer stays, and two are whole as by default: 2 * 1/2 + 2.
@case("resharded to two ranks", peak=ROOT + 3 * LAYER, forward="0 0 0 0 0", backward="1 1 1 1")
def resharded_in_part(device_mesh):
    return of(layered(device_mesh, reshard_after_forward=2))


@case("one ahead", forward="0 0 1 1 1", backward="1 1 1 1")
def one_ahead(device_mesh):
    return of(prefetching(device_mesh, 1, 1))


# The first layer that prefetches asks for two: one of them is used next, the other after that.
@case("two ahead", peak=ROOT + 3 * LAYER, forward="0 0 1 2 2", backward="1 1 2 2")
def two_ahead(device_mesh):
    return of(prefetching(device_mesh, 2, 2))


# A layer that is gathered already is not gathered again, and asks for no other.
@case("none ahead in backward", peak=ROOT + LAYER, forward="0 0 0 0 0", backward="1 0 0 0")
def none_ahead_in_backward(device_mesh):
    model = layered(device_mesh)
    for layer in model.layers:
        layer.set_modules_to_backward_prefetch([layer])
    return of(model)


# The root is used first, then the layer.
@case("by hand", outside="2", forward="0 0 0 0", backward="1 1 1 1")
def by_hand(device_mesh):
    def run(model):
        model.layers[0].unshard(async_op=True)
        step(model)

    return of(layered(device_mesh), run)


# Waiting for a unit is not a use.
@case("by hand, waited for", outside="2", forward="0 0 0 0", backward="1 1 1 1")
def by_hand_and_waited_for(device_mesh):
    def run(model):
        model.layers[0].unshard()
        step(model)

    return of(layered(device_mesh), run)


@case("checkpointed", forward="0 0 0 0 0", backward="1 1 1 1")
def checkpointed(device_mesh):
    return of(shard(Model(LAYERS, reentrant=False), device_mesh()))


@case("checkpointed, reentrant", forward="0 0 0 0 0", backward="1 1 1 1")
def checkpointed_reentrant(device_mesh):
    def run(model):
        step(model, grad_input=True)

    return of(shard(Model(LAYERS, reentrant=True), device_mesh()), run)


@case("two micro-batches", forward="0 0 0 0 0 0 0 0 0 0", backward="1 1 1 1 1 1 1 1")
def two_micro_batches(device_mesh):
    def run(model):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            step(model)

    return of(layered(device_mesh), run)


# The head is kept after forward, but the backward of each chunk frees it, so that of the first
# chunk, which runs last, gathers it again. It is freed before the second layer is gathered.
@case(
    "a head in chunks",
    peak=LINEAR_NBYTES + 2 * LAYER,
    forward="0 0 0 0 0 0",
    backward="0 0 1 1 1 1",
)
def chunks(device_mesh):
    model = Model(LAYERS)
    fully_shard(model.head, mesh=device_mesh(), reshard_after_forward=False)
    shard(model, device_mesh(), root=True)
    return of(model, lambda model: step(model, chunks=2))


@case("two layers a unit", peak=ROOT + 4 * LAYER, forward="0 0 0", backward="1 1")
def pairs(device_mesh):
    model = Model(LAYERS)
    for first in (0, 2):
        fully_shard([*model.layers[first : first + 2]], mesh=device_mesh())
    return of(fully_shard(model, mesh=device_mesh()))


@case("asynchronously", forward="0 0 0 0 0", backward="1 1 1 1")
def asynchronous(device_mesh):
    model = layered(device_mesh)
    for unit in (model, *model.layers):
        unit._set_unshard_async_op(async_op=True)
    return of(model)


# The root asks for the last layer, which is there.
@case("the last layer kept", forward="0 0 0 0 0", backward="1 1 1")
def last_layer_kept(device_mesh):
    model = layered(device_mesh)
    model.layers[-1].set_reshard_after_forward(reshard_after_forward=False)
    return of(model)


@case("in half precision", peak=USUAL // 2, forward="0 0 0 0 0", backward="1 1 1 1")
def in_half_precision(device_mesh):
    model, policy = Model(LAYERS), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=device_mesh(), mp_policy=policy)
    return of(model)


def wrapped(**options):
    model = FullyShardedDataParallel(
        Model(LAYERS),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **options,
    )
    # The first step learns the order.
    step(model)
    return of(model)


@case("FSDP1", FSDP1, forward="0 0 0 0 0", backward="1 1 1 1")
def fsdp1(_):
    return wrapped()


# A layer asks for the one before it when its own backward has ended; the root's ends last.
@case("FSDP1, after backward", FSDP1, peak=ROOT + LAYER, forward="0 0 0 0 0", backward="0 1 1 1")
def fsdp1_after_backward(_):
    return wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST)


@case("FSDP1, none ahead", FSDP1, peak=ROOT + LAYER, forward="0 0 0 0 0", backward="0 0 0 0")
def fsdp1_none_ahead(_):
    return wrapped(backward_prefetch=None)


# In forward, the next layer is requested before the previous one is freed.
@case("FSDP1, forward too", FSDP1, peak=ROOT + 3 * LAYER, forward="0 1 1 1 1", backward="1 1 1 1")
def fsdp1_forward_too(_):
    return wrapped(forward_prefetch=True)


@case("FSDP1, never resharded", FSDP1, peak=ROOT + LAYERS * LAYER, forward="0 0 0 0 0")
def fsdp1_never_resharded(_):
    return wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@case("FSDP1, never sharded", FSDP1, peak=0)
def fsdp1_never_sharded(_):
    return wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)


@case("FSDP1, in half precision", FSDP1, peak=USUAL // 2, forward="0 0 0 0 0", backward="1 1 1 1")
def fsdp1_in_half_precision(_):
    return wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def distances(comm_mode, phase=None):
    return " ".join(
        str(event.ahead)
        for event in comm_mode.events
        if event.kind == "all_gather" and phase in {None, event.phase}
    )


def by_phase(comm_mode):
    phases = dict.fromkeys(event.phase for event in comm_mode.events if event.kind == "all_gather")
    return {str(phase): distances(comm_mode, phase) for phase in phases}


def gathers(comm_mode):
    return [(event.owner, event.ahead) for event in comm_mode.events if event.kind == "all_gather"]


def recorded(comm_mode, model, run):
    with comm_mode(model):
        run()
    # The collective and the unshard that issued it say the same.
    unshards = [event for event in comm_mode.reshards if event.action == "unshard"]
    assert gathers(comm_mode) == [(event.module, event.ahead) for event in unshards]
    # Other events have no distance.
    assert {e.ahead for e in comm_mode.events if e.kind != "all_gather"} <= {None}
    assert {e.ahead for e in comm_mode.reshards if e.action != "unshard"} <= {None}
    assert load_recordings(dump_recordings([comm_mode.recording]))[0] == comm_mode.recording
    return by_phase(comm_mode)


@fake
@no_shard
@pytest.mark.parametrize("name", [*FSDP2, *FSDP1])
def test_each_setting_gathers_as_far_ahead_as_it_says(comm_mode, device_mesh, name):
    arrange, peak, expected = (FSDP2 | FSDP1)[name]
    model, run = arrange(device_mesh)
    for _ in range(2):  # the next step is the same
        assert recorded(comm_mode, model, run) == expected
        assert comm_mode.peak_gathered_nbytes == peak
    # A unit of several modules is labelled with all of them.
    units = [((owner or "").replace("+", ", "), ahead) for owner, ahead in gathers(comm_mode)]
    assert name in FSDP1 or units == profiled_distances(run)
    # Two steps have the peak of one, and the bare mode finds the same.
    with comm_mode:
        run()
        run()
    assert comm_mode.peak_gathered_nbytes == peak


@pytest.mark.distributed(world_size=4)
@no_shard
def test_real_and_simulated_ranks_prefetch_equally(comm_mode, device_mesh):
    for name, (arrange, peak, expected) in (FSDP2 | FSDP1).items():
        assert recorded(comm_mode, *arrange(device_mesh)) == expected, name
        assert comm_mode.peak_gathered_nbytes == peak, name


CHANGES = {
    "forward prefetch dropped": (lambda mesh: of(prefetching(mesh, forward=2)), default),
    "backward prefetch dropped": (default, none_ahead_in_backward),
    "fewer ahead in backward": (two_ahead, lambda mesh: of(prefetching(mesh, 2, 1))),
    "FSDP1: backward prefetch dropped": (fsdp1, fsdp1_none_ahead),
    "FSDP1: forward prefetch dropped": (fsdp1_forward_too, fsdp1),
}


@fake
@pytest.mark.parametrize("name", CHANGES)
def test_only_the_distances_show_a_change_of_prefetch(comm_mode, device_mesh, name):
    def sent(arrange):
        recorded(comm_mode, *arrange(device_mesh))
        everything_else = sorted(
            (event.phase, event.owner or "", event.kind, event.axis, event.nbytes, event.dtype)
            for event in comm_mode.events
        )
        return everything_else, by_phase(comm_mode)

    before, after = CHANGES[name]
    rest, ahead = sent(before)
    assert sent(before) == (rest, ahead)  # the same again
    changed_rest, changed_ahead = sent(after)
    assert changed_rest == rest
    assert changed_ahead != ahead


@fake
@pytest.mark.parametrize("arrange", [one_ahead, fsdp1_forward_too], ids=["FSDP2", "FSDP1"])
def test_without_gradients_forward_is_the_same(comm_mode, device_mesh, arrange):
    model, run = arrange(device_mesh)
    expected = recorded(comm_mode, model, run)["forward"]

    def infer():
        with torch.no_grad():
            model.eval()(torch.randn(2, WIDTH))

    assert recorded(comm_mode, model, infer) == {"forward": expected}


@fake
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled_layers_are_gathered_as_far_ahead(comm_mode, device_mesh):
    model = prefetching(device_mesh, 2, 2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    _, _, expected = FSDP2["two ahead"]
    assert recorded(comm_mode, *of(model)) == expected
    assert recorded(comm_mode, *of(model)) == expected


@fake
def test_a_gather_without_use_has_no_distance(comm_mode, device_mesh):
    model = layered(device_mesh)
    step(model)
    with comm_mode(model):
        model.layers[1].unshard()
        model.layers[1].reshard()
        step(model)
        model.layers[2].unshard()
    # Nor does it count for the one that follows.
    assert distances(comm_mode, "outside") == "None None"
    assert distances(comm_mode, "forward") == "0 0 0 0 0"


@fake
def test_freed_gather_is_not_used_by_later_backward(comm_mode, device_mesh):
    # The gradient of the first module needs its input alone.
    model = Model(LAYERS)
    fully_shard(model.embed, mesh=device_mesh())
    shard(model, device_mesh())
    model.embed.set_unshard_in_backward(unshard_in_backward=False)
    with comm_mode(model):
        loss = model(torch.randn(2, WIDTH)).sum()
        model.embed.unshard()
        model.embed.reshard()
        loss.backward()
    assert distances(comm_mode, "outside") == "None"
    assert distances(comm_mode, "backward") == "1 1 1 1"


@fake
def test_backward_right_after_forward_is_a_new_use(comm_mode, device_mesh):
    model = nn.Sequential(linear(), linear())
    for unit in (*model, model):
        fully_shard(unit, mesh=device_mesh(), reshard_after_forward=True)
    with comm_mode(model):
        loss = model(torch.randn(2, WIDTH)).sum()
        model[0].unshard()
        loss.backward()
    # The backward of 1 comes between; the root has no parameters.
    assert distances(comm_mode, "outside") == "2"


@gloo_and_fake(2)
def test_a_mistargeted_prefetch_has_no_distance(comm_mode, device_mesh):
    class Unused(Model):
        def forward(self, x):
            x = self.layers[1](self.layers[0](self.embed(x)))
            self.layers[2](x)
            return self.head(x)

    model = shard(Unused(3), device_mesh())
    step(model)
    assert recorded(comm_mode, *of(model)) == {"forward": "0 0 0 0", "backward": "None 0 1"}
    assert [owner for owner, ahead in gathers(comm_mode) if ahead is None] == ["layers.2"]


@gloo_and_fake(2)
def test_gather_by_recomputation_has_distance_0(comm_mode, device_mesh):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = nn.Sequential(linear(), linear(), linear())

        def forward(self, x):
            return checkpoint(self.outer, x, use_reentrant=False)

    model = Checkpointed()
    for unit in (model.outer[1], model.outer, model):
        fully_shard(unit, mesh=device_mesh())

    def twice():
        # The second recomputation finds the inner unit resharded by the backward of the first.
        sum(model(torch.randn(2, WIDTH)).sum() for _ in range(2)).backward()

    expected = {"forward": "0 0 0 0", "backward": "0 1", "recompute": "0"}
    assert recorded(comm_mode, model, twice) == expected
    assert gathers(comm_mode)[-1] == ("outer.1", 0)


@gloo_and_fake(2)
def test_second_module_of_unit_opens_no_slot(comm_mode, device_mesh):
    model = nn.Sequential(*(linear() for _ in range(4)))
    for unit in ([model[0], model[2]], model[1], model[3], model):
        fully_shard(unit, mesh=device_mesh())
    model[1].set_modules_to_forward_prefetch([model[3]])
    step(model)
    recorded(comm_mode, *of(model))
    # The unit of 0 and 2 is in use all the while.
    assert gathers(comm_mode)[:3] == [("0+2", 0), ("1", 0), ("3", 1)]


@fake
def test_parameter_groups_of_module_share_a_slot(comm_mode, device_mesh):
    api = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(api, "ShardPlacementResult"):
        pytest.skip("a unit of this torch has one parameter group")
    model = Model(LAYERS)
    meshes = [api.FSDPMeshInfo(mesh, 0) for mesh in (device_mesh(), device_mesh(ep=2, dp=2)["dp"])]
    for layer in model.layers:
        # As experts are sharded over another mesh than the rest of their layer.
        fully_shard(
            layer,
            mesh=device_mesh(),
            shard_placement_fn=lambda weight, down=layer.down.weight: api.ShardPlacementResult(
                Shard(0), meshes[weight is down]
            ),
        )
    fully_shard(model, mesh=device_mesh())
    # The root prefetches one group, whose layer gathers the other; each layer prefetches both.
    assert recorded(comm_mode, *of(model)) == {
        "forward": "0 0 0 0 0 0 0 0 0",
        "backward": "1 0 1 1 1 1 1 1",
    }


@gloo_and_fake(2)
def test_second_output_of_unit_opens_no_slot(comm_mode, device_mesh):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.inner = linear(), linear()

        def forward(self, x):
            x = self.own(x)
            return x, torch.relu(self.inner(x))

    model = nn.Sequential(linear(), Outer())
    for unit in (model[0], model[1].inner, model[1], model):
        fully_shard(unit, mesh=device_mesh())

    def run():
        sum(output.sum() for output in model(torch.randn(2, WIDTH))).backward()

    # The backward of the second output lies between that of the first one and that of 0.
    assert recorded(comm_mode, model, run) == {"forward": "0 0 0", "backward": "0 1 1"}
    assert [owner for owner, _ in gathers(comm_mode)[3:]] == ["1", "1.inner", "0"]


@fake
def test_backward_in_later_block_keeps_distances(comm_mode, device_mesh):
    for model, _ in (default(device_mesh), fsdp1(device_mesh)):
        with comm_mode(model):
            loss = model(torch.randn(2, WIDTH)).sum()
        assert by_phase(comm_mode) == {"forward": "0 0 0 0 0"}
        with comm_mode(model):
            loss.backward()
        assert by_phase(comm_mode) == {"backward": "1 1 1 1"}
        loss = model(torch.randn(2, WIDTH)).sum()  # while nothing records
        with comm_mode(model):
            loss.backward()
        assert by_phase(comm_mode) == {"backward": "1 1 1 1"}


@fake
def test_unit_gathered_before_block_shifts_no_other(comm_mode, device_mesh):
    model = layered(device_mesh)
    model.layers[1].unshard()
    assert recorded(comm_mode, *of(model)) == {"forward": "0 0 0 0", "backward": "1 1 1 1"}


@fake
def test_a_step_that_failed_leaves_no_distance_behind(comm_mode, device_mesh):
    model = layered(device_mesh)
    step(model)
    broken = model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), comm_mode(model):
        step(model)
    assert distances(comm_mode) == "0 0 0 0"
    broken.remove()
    fresh = layered(device_mesh)
    assert recorded(comm_mode, *of(fresh)) == FSDP2["by default"][-1]
