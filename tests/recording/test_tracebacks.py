"""pytest prints the same frames of an error in a block as without the block."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Model, shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group


def shown(run):
    """The files that pytest shows of the error that a function raises."""
    with pytest.raises(RuntimeError) as raised:
        run()
    return [Path(entry.path).name for entry in raised.traceback.filter(raised)][1:]


def wrong_shape():
    Model()(torch.ones(2, WIDTH + 1))


def wrong_size():
    dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2))


def failing_hook():
    embedded = Model().embed(torch.ones(2, WIDTH))
    embedded.register_hook(lambda grad: grad + torch.ones(WIDTH + 1))
    embedded.sum().backward()


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("run", [wrong_shape, wrong_size, failing_hook])
def test_an_error_shows_no_frame_of_the_recorder(comm_mode, run):
    def in_block():
        with comm_mode:
            run()

    expected = shown(run)
    assert len(expected) > 1
    assert shown(in_block)[1:] == expected


@pytest.mark.distributed(world_size=2, backend="fake")
def test_error_of_unit_hides_frames_of_recorder(comm_mode, device_mesh, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError

    model = shard(Model(), device_mesh())
    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", fail)

    def in_block():
        with comm_mode:
            model(torch.ones(2, WIDTH))

    assert shown(in_block) == shown(lambda: model(torch.ones(2, WIDTH)))
