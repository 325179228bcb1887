"""Recordings in odd circumstances; the texts of `comm_mode`'s own errors are
in `test_comm_debug`."""

import pytest
import torch
import torch.distributed as dist
from models import Model, shard, step
from oracle import lines
from torch import nn

from pytest_fsdp_comm import RecordingError

fake = pytest.mark.distributed(world_size=4, backend="fake")
ws2 = pytest.mark.distributed(world_size=2)


@pytest.fixture(scope="module")
def odd_op():
    """An operation of a communication namespace that is not in the tables."""
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("odd_op(Tensor input, str group_name) -> Tensor")
    library.impl("odd_op", lambda tensor, _group: tensor.clone(), "CompositeExplicitAutograd")
    yield torch.ops._c10d_functional.odd_op
    library._destroy()


@fake
def test_an_unknown_operation_is_kept(comm_mode, odd_op):
    class Sends(nn.Module):
        def forward(self, x):
            return odd_op(x, dist.group.WORLD.group_name)

    model = nn.Sequential(Sends())
    with comm_mode(model):
        model(torch.ones(6))
    assert lines(comm_mode) == ["forward 0 unknown:odd_op[world] 24 < 0"]
    assert comm_mode.events[0].op == "_c10d_functional.odd_op"
    assert comm_mode.counts("unknown:odd_op") == 1


@ws2
def test_group_destroyed_in_block_loses_no_event(comm_mode, dist_info):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        dist.destroy_process_group()
    recording = comm_mode.recording
    assert (recording.rank, recording.world_size) == (dist_info.rank, 2)
    assert recording.backend == "gloo"
    assert lines(comm_mode)[0] == "outside - all_reduce[world] 8 < -"
    with comm_mode:
        pass
    assert comm_mode.recording.backend == ""
    with pytest.raises(RecordingError, match="recorded without a process group"):
        comm_mode.merged_profile()


@fake
def test_group_made_in_block_is_named_by_shape(comm_mode):
    with comm_mode:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
    assert lines(comm_mode)[-1] == "outside - all_reduce[size2.stride1] 8 < -"


@fake
def test_nested_entry_raises_and_outer_block_goes_on(comm_mode):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        with pytest.raises(RecordingError, match="cannot be nested"):
            comm_mode.__enter__()
        dist.all_reduce(torch.ones(2))
    assert len(comm_mode.events) == 2


@fake
def test_events_of_another_model_have_no_owner(comm_mode, device_mesh):
    model, other = (shard(Model(), device_mesh()) for _ in range(2))
    # Names are relative to the model passed in, but another model ran.
    with comm_mode(model):
        step(other)
    assert {event.owner for event in comm_mode.events} == {None}
    assert {event.source.value for event in comm_mode.events} == {"fsdp"}


@fake
def test_failing_operation_is_not_counted(comm_mode):
    def send():
        with comm_mode:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2).to_sparse().to("meta"))

    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        send()
    assert lines(comm_mode) == ["outside - all_reduce[world] 8 < -"]
    assert comm_mode.reshards == ()
