"""Other tools of torch that run as well, entered before or in the block: the same events.

What is expected is counted by hand, once for each step; a step under a tool is compared with it and
with the whole recording without the tool.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard
from oracle import gloo_and_fake, lines
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from pytest_fsdp_comm import CommMode

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


def told(comm_mode):
    """`lines`, and how far ahead, or the role of what is not gathered."""
    return [
        f"{line} {event.role}" if event.ahead is None else f"{line} ahead {event.ahead}"
        for line, event in zip(lines(comm_mode), comm_mode.events, strict=True)
    ]


def sharded(device_mesh):
    torch.manual_seed(0)
    model = shard(Model(), device_mesh())
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return model


def run(model):
    """One step, at one place, so that call sites are the same."""
    model(torch.ones(2, WIDTH)).sum().backward()


def recorded(comm_mode, model, tool=contextlib.nullcontext, order="before", run=run):
    """What `comm_mode` records of a step while the tool runs that was entered in that order."""
    with contextlib.ExitStack() as stack:
        contexts = [tool(), comm_mode(model)]
        for context in contexts if order == "before" else reversed(contexts):
            stack.enter_context(context)
        run(model)
    return replace(comm_mode.recording, timings=())


def siteless(recording):
    """Without call sites: where a test's own function stands between, that is the innermost."""
    return replace(recording, collectives=[replace(e, call_site="") for e in recording.collectives])


orders = pytest.mark.parametrize("order", ["before", "in the block"])


@gloo_and_fake(2)
@orders
def test_a_memory_tracker_changes_no_event(comm_mode, device_mesh, order):
    alone = recorded(comm_mode, sharded(device_mesh))
    assert told(comm_mode) == [*FORWARD, *BACKWARD]
    model = sharded(device_mesh)
    tracker = FSDPMemTracker(model)
    assert recorded(comm_mode, model, lambda: tracker, order) == alone
    assert len(tracker.memory_tracking) == 3  # the units: it saw the step
    # It leaves its methods on the groups.
    assert recorded(comm_mode, model) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize("name", ["pre_forward", "unshard", "reshard", "post_backward"])
@orders
def test_a_method_that_a_library_gives_a_group_changes_no_event(
    comm_mode, device_mesh, name, order
):
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
            with pytest.raises(AttributeError):
                delattr(group, name)

    assert siteless(recorded(comm_mode, model, patched, order)) == siteless(alone)
    assert len(called) >= 3  # units
    assert recorded(comm_mode, model) == alone


@pytest.mark.distributed(world_size=2, backend="fake")
def test_recordings_that_overlap_watch_the_units_and_leave_nothing(device_mesh):
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
    acts = [(event.action, event.module, event.ahead) for event in alone.reshards]
    assert [(event.action, event.module, event.ahead) for event in first.reshards] == acts
    assert [(event.action, event.module, event.ahead) for event in second.reshards] == [
        *acts[-len(backward_of(alone.reshards)) :],
        *acts,
    ]


@pytest.mark.distributed(world_size=2, backend="fake")
def test_a_patch_of_the_class_in_the_block_stays_whole(comm_mode, device_mesh, monkeypatch):
    alone = recorded(comm_mode, sharded(device_mesh))
    calls = []
    model = sharded(device_mesh)
    with comm_mode(model):
        ours = FSDPParamGroup.unshard

        def unshard(*args, **kwargs):
            calls.append(1)
            return ours(*args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, "unshard", unshard)
        run(model)
    assert comm_mode.reshards == alone.reshards
    assert FSDPParamGroup.unshard is unshard
    before = len(calls)
    assert siteless(recorded(comm_mode, model)) == siteless(alone)
    assert len(calls) == 2 * before > 0
