"""Other tools of torch that run as well, entered before or in the block: the same events.

What is expected is counted by hand, once for each step; a step under a tool is compared with it and
with the whole recording without the tool.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import ACTIVATION_NBYTES, BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard
from oracle import gloo_and_fake, lines
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pytest_fsdp_comm import CommMode

# Tools warn that they are slow or new, and FSDP2 of outputs that they make views.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, ROOT = BLOCK_NBYTES, ROOT_NBYTES

# Each layer prefetches the other one, in forward and in backward.
FORWARD = [
    f"forward . all_gather[dp] {ROOT} < . ahead 0",
    f"forward layers.0 all_gather[dp] {BLOCK} < layers.0 ahead 0",
    f"forward layers.1 all_gather[dp] {BLOCK} < layers.0 ahead 1",
]
BACKWARD = [
    f"backward layers.1 all_gather[dp] {BLOCK} < . ahead 1",
    f"backward layers.0 all_gather[dp] {BLOCK} < layers.1 ahead 1",
    f"backward layers.1 reduce_scatter[dp] {BLOCK} < layers.1 gradients",
    f"backward layers.0 reduce_scatter[dp] {BLOCK} < layers.0 gradients",
    f"backward . reduce_scatter[dp] {ROOT} < . gradients",
]


# Each block reduces its output, and in backward the gradient of its input.
TP_FORWARD = [
    f"forward layers.{n}.down all_reduce[tp] {ACTIVATION_NBYTES} < layers.{n}.down activations"
    for n in (0, 1)
]
TP_BACKWARD = [
    f"backward layers.{n}.up all_reduce[tp] {ACTIVATION_NBYTES} < layers.{n}.up activations"
    for n in (1, 0)
]


NOTHING = contextlib.nullcontext()


def told(comm_mode):
    """`lines`, and how far ahead, or the role of what is not gathered."""
    return [
        f"{line} {event.role}" if event.ahead is None else f"{line} ahead {event.ahead}"
        for line, event in zip(lines(comm_mode), comm_mode.events, strict=True)
    ]


def sharded(device_mesh, within=NOTHING):
    mesh = device_mesh()
    torch.manual_seed(0)
    with within:
        model = shard(Model(), mesh)
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return model


def parallel(device_mesh, within=NOTHING):
    mesh = device_mesh(tp=2)
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with within:
        model = Model()
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
    return model


@dataclass
class Step:
    """A model, made within a context, and what one step of it sends."""

    arrange: Callable[..., nn.Module]
    forward: Sequence[str]
    backward: Sequence[str]

    @property
    def all(self):
        return [*self.forward, *self.backward]


SHARDED = Step(sharded, FORWARD, BACKWARD)
PARALLEL = Step(parallel, TP_FORWARD, TP_BACKWARD)


def run(model):
    """One step, at one place, so that call sites are the same."""
    model(torch.ones(2, WIDTH)).sum().backward()


def run_with_input_gradient(model):
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


def forward(model):
    model(torch.ones(2, WIDTH))


def recorded(comm_mode, model, tool=lambda: NOTHING, order="before", run=run):
    """What `comm_mode` records of a step while the tool runs that was entered in that order."""
    with contextlib.ExitStack() as stack:
        contexts = [tool(), comm_mode(model)]
        for context in contexts if order == "before" else reversed(contexts):
            stack.enter_context(context)
        run(model)
    return replace(comm_mode.recording, timings=())


def siteless(recording):
    """Return the fields without call sites, which wrappers in the test change."""
    fields = {
        "collectives": [
            replace(event, call_site="", is_of_backward=False) for event in recording.collectives
        ],
        "redistributions": [replace(move, call_site="") for move in recording.redistributions],
    }
    return replace(recording, **fields)


orders = pytest.mark.parametrize("order", ["before", "in the block"])


@gloo_and_fake(2)
def test_memory_tracker_in_block_changes_no_event(comm_mode, device_mesh):
    alone = recorded(comm_mode, sharded(device_mesh))
    assert told(comm_mode) == [*FORWARD, *BACKWARD]
    model = sharded(device_mesh)
    tracker = FSDPMemTracker(model)
    assert recorded(comm_mode, model, lambda: tracker, "in the block") == alone
    assert len(tracker.memory_tracking) == 3  # the units: it saw the step
    # It leaves its methods on the groups.
    assert recorded(comm_mode, model) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.filterwarnings("ignore::pytest_fsdp_comm.UnseenCollectivesWarning")
def test_a_memory_tracker_before_the_block_is_a_gap(comm_mode, device_mesh):
    model = sharded(device_mesh)
    for _ in range(2):  # it leaves its methods on the groups
        (gap,) = recorded(comm_mode, model, lambda: FSDPMemTracker(model)).gaps
        assert gap.text.startswith("post_backward, pre_backward of FSDP units had been replaced")


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("name", ["pre_forward", "unshard", "reshard", "post_backward"])
def test_method_set_on_group_in_block_changes_no_event(comm_mode, device_mesh, name):
    alone = recorded(comm_mode, sharded(device_mesh))
    model = sharded(device_mesh)
    called = []

    @contextlib.contextmanager
    def patched():
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in (model, *model.layers)]
        for group in groups:
            original = getattr(group, name)

            def own(*args, original=original, **kwargs):
                called.append(name)
                return original(*args, **kwargs)

            setattr(group, name, own)
        yield
        for group in groups:
            delattr(group, name)

    inside = recorded(comm_mode, model, patched, "in the block")
    assert siteless(inside) == siteless(alone)
    assert len(called) >= 3  # units
    assert recorded(comm_mode, model) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
def test_overlapping_recordings_restore_methods(device_mesh):
    def backward_of(reshards):
        return [event for event in reshards if event.phase == "backward"]

    before = dict(vars(FSDPParamGroup))
    alone, first, second = CommMode(), CommMode(), CommMode()
    recorded(alone, sharded(device_mesh))
    model = sharded(device_mesh)
    first(model).__enter__()
    loss = model(torch.ones(2, WIDTH)).sum()
    second(model).__enter__()
    loss.backward()
    first.__exit__(None, None, None)
    run(model)
    second.__exit__(None, None, None)
    assert dict(vars(FSDPParamGroup)) == before
    assert told(first) == SHARDED.all
    assert told(second) == [*BACKWARD, *SHARDED.all]
    acts = [(event.action, event.module, event.ahead) for event in alone.reshards]
    assert [(event.action, event.module, event.ahead) for event in first.reshards] == acts
    assert [(event.action, event.module, event.ahead) for event in second.reshards] == [
        *acts[-len(backward_of(alone.reshards)) :],
        *acts,
    ]


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("name", ["unshard", "reshard"])
def test_leftover_class_patch_counts_no_unit_twice(comm_mode, device_mesh, monkeypatch, name):
    alone = siteless(recorded(comm_mode, sharded(device_mesh)))
    calls = []
    model = sharded(device_mesh)
    with comm_mode(model):
        ours = getattr(FSDPParamGroup, name)

        def patch(*args, **kwargs):
            calls.append(1)
            return ours(*args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, name, patch)
        run(model)
    assert siteless(replace(comm_mode.recording, timings=())) == alone
    assert getattr(FSDPParamGroup, name) is patch
    count = len(calls)
    assert siteless(recorded(comm_mode, sharded(device_mesh))) == alone
    assert len(calls) == 2 * count > 0


@contextlib.contextmanager
def calls_wrapped():
    """Wrap each call of a module, as a library may, by a closure that tells nothing of it."""
    original = vars(nn.Module)["__call__"]

    def call(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        assert nn.Module.__call__ is call
        nn.Module.__call__ = original


@pytest.mark.distributed(world_size=2, backend="fake")
@orders
def test_calls_that_a_library_wraps_change_no_event(comm_mode, device_mesh, order):
    alone = siteless(recorded(comm_mode, SHARDED.arrange(device_mesh)))
    assert told(comm_mode) == SHARDED.all
    model = SHARDED.arrange(device_mesh)
    assert siteless(recorded(comm_mode, model, calls_wrapped, order)) == alone
    assert siteless(recorded(comm_mode, model)) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
def test_root_run_without_call_still_names_modules(comm_mode):
    class Bypassing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def __call__(self, x):
            return self._call_impl(x)

        def forward(self, x):
            y = self.inner(x)
            dist.all_reduce(y.detach())
            return y

    with comm_mode:
        Bypassing()(torch.ones(1, 2))
    assert [event.owner for event in comm_mode.events] == [""]


@contextlib.contextmanager
def resharded_otherwise():
    """Have units reshard by code that says that it wraps torch's, and calls what that would."""
    original = vars(FSDPParamGroup)["reshard"]

    @functools.wraps(original)
    def reshard(self):
        if self._reshard_after_forward or self._training_state.name != "FORWARD":
            self._to_sharded()

    FSDPParamGroup.reshard = reshard
    try:
        yield
    finally:
        FSDPParamGroup.reshard = original


@pytest.mark.distributed(world_size=2, backend="fake")
def test_replacement_of_method_by_name_is_watched(comm_mode, device_mesh):
    model = sharded(device_mesh)
    alone = siteless(recorded(comm_mode, model))
    assert len([event for event in alone.reshards if event.action == "reshard"]) > 2
    assert siteless(recorded(comm_mode, model, resharded_otherwise)) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
def test_a_patch_in_the_block_outlives_a_compilation(comm_mode, device_mesh, monkeypatch):
    called, model = [], sharded(device_mesh)

    def wrapped(original):
        def call(self, *args, **kwargs):
            called.append(1)
            return original(self, *args, **kwargs)

        return call

    # With another library's around it, the attribute is what a block sets.
    monkeypatch.setattr(nn.Module, "__call__", wrapped(nn.Module.__call__))
    with comm_mode(model):
        own = wrapped(nn.Module.__call__)
        monkeypatch.setattr(nn.Module, "__call__", own)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        called.clear()
        forward(model)
        assert len(called) >= 2 * 3  # twice each unit
    assert nn.Module.__call__ is own


@pytest.mark.distributed(world_size=2, backend="fake")
def test_a_scripted_module_can_be_called_in_a_block(comm_mode):
    scripted = torch.jit.script(nn.Linear(2, 2))
    with comm_mode:
        scripted(torch.ones(1, 2))
        dist.all_reduce(torch.ones(2))
    assert len(comm_mode.events) == 1


class Passes(TorchDispatchMode):
    """A dispatch mode written by a user."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


TOOLS = {
    "MemTracker": MemTracker,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "CommDebugMode": CommDebugMode,
    # Not in every torch that is supported.
    "DebugMode": lambda: pytest.importorskip("torch.utils._debug_mode").DebugMode(),
    "LoggingTensorMode": LoggingTensorMode,
    "torch.autograd.profiler": torch.autograd.profiler.profile,
    "torch.profiler": lambda: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor
    ),
    # DTensor cannot check for NaN.
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}

steps = pytest.mark.parametrize("step", [SHARDED, PARALLEL], ids=["FSDP2", "TP"])


@gloo_and_fake(2)
@pytest.mark.parametrize("name", TOOLS)
@steps
def test_a_tool_changes_no_event(comm_mode, device_mesh, name, step):
    alone = recorded(comm_mode, step.arrange(device_mesh))
    assert told(comm_mode) == step.all
    for order in ("before", "in the block"):
        assert recorded(comm_mode, step.arrange(device_mesh), TOOLS[name], order) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("mode", [Passes, PassesFunctions])
@steps
def test_a_mode_of_a_users_own_changes_no_event(comm_mode, device_mesh, mode, step):
    alone = siteless(recorded(comm_mode, step.arrange(device_mesh)))
    assert told(comm_mode) == step.all
    for order in ("before", "in the block"):
        assert siteless(recorded(comm_mode, step.arrange(device_mesh), mode, order)) == alone


@gloo_and_fake(2)
@orders
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@steps
def test_a_forward_without_gradients_is_that_of_a_step(
    comm_mode, device_mesh, without_gradients, step, order
):
    recorded(comm_mode, step.arrange(device_mesh), without_gradients, order, forward)
    assert told(comm_mode) == step.forward


@pytest.mark.distributed(world_size=2, backend="fake")
@orders
@steps
def test_fake_tensor_step_matches_real_step(comm_mode, device_mesh, step, order):
    mode = FakeTensorMode()
    recorded(comm_mode, step.arrange(device_mesh, mode), lambda: mode, order)
    assert told(comm_mode) == step.all


@gloo_and_fake(2)
@orders
def test_comm_debug_mode_counts_same_during_recording(comm_mode, device_mesh, order):
    theirs = CommDebugMode()
    recorded(comm_mode, sharded(device_mesh), lambda: theirs, order)
    assert theirs.get_total_counts() == len(comm_mode.events) == 8


@gloo_and_fake(2)
def test_checkpoint_recomputes_its_reductions(comm_mode, device_mesh):
    for reentrant in (False, True):
        model = shard(Model(reentrant=reentrant), device_mesh())
        recorded(comm_mode, model, run=run_with_input_gradient)
        # The units are gathered by then. No layer prefetches another here, nor in forward.
        alone = FORWARD[2].replace("< layers.0 ahead 1", "< layers.1 ahead 0")
        assert told(comm_mode) == [*FORWARD[:2], alone, *BACKWARD]
        model = parallel(device_mesh)
        model.reentrant = reentrant
        recorded(comm_mode, model, run=run_with_input_gradient)
        # The other kind stops before the block's output, which nothing needs.
        again = [line.replace("forward", "recompute") for line in TP_FORWARD if reentrant]
        assert told(comm_mode) == [
            *TP_FORWARD,
            *(*again[1:], TP_BACKWARD[0]),
            *(*again[:1], TP_BACKWARD[1]),
        ]


class Reduces(nn.Linear):
    """Sums its output, by a functional collective or in place."""

    def __init__(self, *, in_place):
        super().__init__(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x):
        x = super().forward(x)
        if not self.in_place:
            return funcol.all_reduce(x, "sum", dist.group.WORLD)
        dist.all_reduce(x)
        return x


# Of torch.func, and how often it runs the collective. torch has no batching rule for those in
# place, and no derivative for the others.
TRANSFORMS = {
    "grad": (1, True, lambda model, x: torch.func.grad(lambda x: model(x).sum())(x)),
    "vjp": (1, True, lambda model, x: torch.func.vjp(model, x)[1](x)),
    "jvp": (1, False, lambda model, x: torch.func.jvp(model, (x,), (x,))),
    "functionalize": (1, False, lambda model, x: torch.func.functionalize(model)(x)),
    # One slice at a time.
    "vmap": (3, False, lambda model, x: torch.func.vmap(model)(x.expand(3, *x.shape))),
}


@gloo_and_fake(2)
@orders
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functorch_transforms_are_recorded_as_sent(comm_mode, name, order):
    count, in_place, transformed = TRANSFORMS[name]
    model, x = nn.Sequential(Reduces(in_place=in_place)), torch.ones(2, WIDTH)

    def recorded_inside(x):
        with comm_mode(model):
            return model(x)

    if order == "before":
        transformed(recorded_inside, x)
    else:
        with comm_mode(model):
            transformed(model, x)
    line = f"forward 0 all_reduce[world] {ACTIVATION_NBYTES} < 0 activations"
    assert told(comm_mode) == [line] * count
