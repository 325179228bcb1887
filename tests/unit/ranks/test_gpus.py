"""Counting GPUs, and what at collection makes forked ranks unable to use them.

There may be no GPU here. torch's own functions run, on stubs of what they call: the CUDA runtime,
which starts the driver, and NVML, which does not.
"""

import os

import pytest
import torch

from pytest_fsdp_comm.ranks.rank import gpus
from pytest_fsdp_comm.ranks.rank.gpus import (
    blame_missing_gpu_in_errors,
    count_visible_gpus,
    get_gpu_error,
)
from pytest_fsdp_comm.ranks.start import spawn
from pytest_fsdp_comm.ranks.start.spawn import find_reason_not_to_fork

STARTED = "the CUDA driver was started during collection"


NO_GPU = "No CUDA GPUs are available"


class Machine:
    """GPUs, and who has started their driver."""

    def __init__(self):
        self.gpus = 2
        self.has_nvml = True
        self.started_in = None

    def runtime_count(self):
        if self.is_in_bad_fork():
            return 0
        self.started_in = os.getpid()
        return self.gpus

    def runtime_init(self):
        assert not self.is_in_bad_fork()
        assert not self.gpus, "CUDA was initialized"
        raise RuntimeError(NO_GPU)

    def nvml_count(self):
        return 2 if self.has_nvml else -1

    def is_in_bad_fork(self):
        return self.started_in not in {None, os.getpid()}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    machine = Machine()
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", machine.runtime_count, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_init", machine.runtime_init, raising=False)
    monkeypatch.setattr(torch.cuda, "_cudart", object())
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", machine.is_in_bad_fork, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", machine.is_in_bad_fork)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", machine.nvml_count)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    (tmp_path / "driver").touch()
    monkeypatch.setattr(gpus, "_DRIVER_FILES", (tmp_path / "driver",))
    # What other tests of this process left is not the point.
    monkeypatch.setattr(spawn.threading, "enumerate", list)
    monkeypatch.setattr(spawn, "_count_and_name_native_threads", lambda: (0, set()))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    get_gpu_error.cache_clear()
    yield machine
    get_gpu_error.cache_clear()


@pytest.mark.usefixtures("machine")
def test_is_available_starts_the_driver_and_is_named():
    assert find_reason_not_to_fork() == ""
    assert torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert find_reason_not_to_fork().startswith(STARTED)
    assert "unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set" in find_reason_not_to_fork()


def test_is_available_by_nvml_is_safe(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert torch.cuda.is_available()
    assert find_reason_not_to_fork() == ""
    # Where it does not answer, torch asks the driver after all.
    machine.has_nvml = False
    assert torch.cuda.is_available()
    assert find_reason_not_to_fork().startswith(STARTED)


@pytest.mark.parametrize(("has_nvml", "reason"), [(True, ""), (False, STARTED)])
def test_device_count_is_as_safe_as_nvml_is_there(machine, has_nvml, reason):
    machine.has_nvml = has_nvml
    assert torch.cuda.device_count() == 2
    assert find_reason_not_to_fork()[: len(STARTED)] == reason


@pytest.mark.parametrize("has_nvml", [True, False])
def test_counting_never_starts_the_driver_here(machine, has_nvml):
    machine.has_nvml = has_nvml
    assert count_visible_gpus() == 2
    assert machine.started_in is None
    assert find_reason_not_to_fork() == ""


def test_gpus_are_counted_where_the_driver_was_started(machine):
    machine.has_nvml = False
    assert torch.cuda.is_available()
    assert count_visible_gpus() == 2


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_driver_that_found_no_gpu_survives_a_fork(machine, has_nvml):
    # Such as with CUDA_VISIBLE_DEVICES="", or where NVML knows of GPUs that CUDA cannot use.
    machine.has_nvml = has_nvml
    machine.gpus = 0
    assert not torch.cuda.is_available()
    assert find_reason_not_to_fork() == ""
    with pytest.raises(RuntimeError, match=NO_GPU):
        torch.cuda.init()
    assert find_reason_not_to_fork() == ""


def test_gpu_count_starts_no_driver_and_no_cuda(machine):
    machine.gpus = 0
    assert find_reason_not_to_fork() == ""
    assert machine.started_in is None
    machine.gpus = 2
    assert torch.cuda.is_available()
    assert find_reason_not_to_fork().startswith(STARTED)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("gpus", "asked", "error"),
    [(0, True, NO_GPU), (0, False, NO_GPU), (2, True, "Cannot re-initialize CUDA in forked")],
)
def test_missing_gpu_error_is_the_same_in_a_fork(machine, monkeypatch, gpus, asked, error):
    machine.gpus = gpus
    if asked:
        torch.cuda.is_available()
        find_reason_not_to_fork()
        # As in a child.
        machine.started_in = 1
    monkeypatch.setattr(torch._C, "_cuda_init", torch._C._cuda_init)  # restores both
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", torch.cuda._is_in_bad_fork)
    blame_missing_gpu_in_errors()
    with pytest.raises(RuntimeError, match=error):
        torch.cuda.init()


def test_no_child_is_forked_without_cuda(monkeypatch):
    if hasattr(torch._C, "_cuda_isInBadFork"):
        pytest.skip("this build of torch has CUDA")
    monkeypatch.setattr(spawn.threading, "enumerate", list)
    monkeypatch.setattr(spawn, "_count_and_name_native_threads", lambda: (0, set()))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(os, "fork", None)
    assert find_reason_not_to_fork() == ""


def test_torch_has_the_names_that_the_stubs_replace():
    assert not torch.cuda._is_in_bad_fork()
    assert hasattr(torch._C, "_cuda_isInBadFork") == torch.cuda._is_compiled()
    assert {"_nvml_based_avail", "_C", "_cuda_getDeviceCount"} <= {
        *torch.cuda.is_available.__code__.co_names
    }
    assert {"_is_in_bad_fork", "_C", "_cuda_init", "_cudart"} <= {
        *torch.cuda._lazy_init.__code__.co_names
    }


@pytest.mark.parametrize(
    ("holder", "name"), [(torch.cuda, "_is_in_bad_fork"), (torch._C, "_cuda_getDeviceCount")]
)
def test_without_private_name_errors_stay_torchs(machine, monkeypatch, holder, name):
    machine.gpus, machine.started_in = 0, 1
    monkeypatch.delattr(holder, name)
    get_gpu_error.cache_clear()
    blame_missing_gpu_in_errors()
    assert torch._C._cuda_init == machine.runtime_init
