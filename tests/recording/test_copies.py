"""Copies between host and device, with fake devices."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pytest_fsdp_comm.recording.operations import copy_direction

NBYTES = 4 * 8


@pytest.mark.distributed(world_size=2, backend="fake")
def test_copies_to_the_host_are_recorded(comm_mode):
    with FakeTensorMode() as fake, comm_mode:
        host = torch.ones(8)
        device = FakeTensor(fake, torch.empty(8, device="meta"), torch.device("cuda"))
        device.to("cpu")
        host.copy_(device)
        host.to(torch.float64)
        host.copy_(torch.zeros(8))
    assert [(copy.direction, copy.nbytes) for copy in comm_mode.recording.copies] == [
        ("D2H", NBYTES),
        ("D2H", NBYTES),
    ]
    assert all("test_copies.py:" in copy.call_site for copy in comm_mode.recording.copies)
    assert {copy.phase.value for copy in comm_mode.recording.copies} == {"outside"}
    assert set(comm_mode.timings) == {
        "all_gather",
        "all_gather_object",
        "reduce",
        "resharding",
        "H2D",
        "D2H",
        "all",
    }


def test_the_direction_of_a_copy_follows_from_its_devices():
    # A torch without CUDA refuses to run a copy to it, even of fake tensors.
    with FakeTensorMode() as fake:
        host = torch.ones(8)
        device = FakeTensor(fake, torch.empty(8, device="meta"), torch.device("cuda"))
    to, copy = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
    assert copy_direction(to, (host,), {"device": torch.device("cuda", 1)}) == "H2D"
    assert copy_direction(to, (device,), {"device": "cpu"}) == "D2H"
    assert copy_direction(to, (host,), {"dtype": torch.float64}) is None
    assert copy_direction(to, (host,), {"device": torch.device("meta")}) is None
    assert copy_direction(to, (device,), {"device": torch.device("cuda", 1)}) is None
    assert copy_direction(copy, (device, host), {}) == "H2D"
    assert copy_direction(copy, (host, device), {}) == "D2H"
    assert copy_direction(copy, (host, host), {}) is None
    assert copy_direction(torch.ops.aten.add.Tensor, (host, host), {}) is None
