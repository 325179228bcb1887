"""Copies between host and device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pytest_fsdp_comm.recording import kernels
from pytest_fsdp_comm.recording.operations import copy_direction

NBYTES = 4 * 8


@pytest.mark.upstream
@pytest.mark.distributed(world_size=2, backend="fake")
def test_copies_to_the_host_are_recorded(comm_mode, monkeypatch):
    # Without a device, numbers of double width stand for those of one; see test_gpus.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        kernels,
        "copy_direction",
        lambda to, source: "D2H" if source.dtype != to.dtype == torch.float32 else None,
    )
    host, device = torch.ones(8), torch.ones(8, dtype=torch.float64)
    with comm_mode:
        device.to(torch.float32)
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


@pytest.mark.upstream
@pytest.mark.distributed(world_size=2, backend="fake")
def test_copies_of_a_number_pass(comm_mode, monkeypatch):
    # torch gives a kernel in Python the number, and not the tensor that it made of it.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    ones = torch.ones(2, dtype=torch.float64)
    with comm_mode:
        assert ones.copy_(0.1).tolist() == [0.1, 0.1]
    assert ones.copy_(0.1).tolist() == [0.1, 0.1]
    assert ones.to(torch.int64).copy_(2.5).tolist() == [2, 2]
    assert ones.to(torch.complex64).copy_(2j).tolist() == [2j, 2j]
    assert torch.where(ones > 0, 1, ones).tolist() == [1.0, 1.0]
    assert repr(ones) == "tensor([0.1000, 0.1000], dtype=torch.float64)"
    assert comm_mode.recording.copies == ()


@pytest.mark.distributed(world_size=2, backend="fake")
def test_copies_of_fake_tensors_are_none(comm_mode, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    host, device = fakes()
    with comm_mode, host.fake_mode:
        host.copy_(device)
        device.to("cpu")
    assert comm_mode.recording.copies == ()


def fakes():
    """A tensor of the host, and one of a device that is not there."""
    with FakeTensorMode() as fake:
        meta = torch.empty(8, device="meta")
        return torch.ones(8), FakeTensor(fake, meta, torch.device("cuda:0"))


def test_the_direction_of_a_copy_follows_from_its_devices():
    host, device = fakes()
    assert copy_direction(device, host) == "H2D"
    assert copy_direction(host, device) == "D2H"
    assert copy_direction(host, host) is None
    assert copy_direction(device, device) is None
    assert copy_direction(torch.empty(8, device="meta"), host) is None
