"""Counts the GPUs that ranks may use, and checks whether the CUDA driver has been started."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_fsdp_comm.launch_environment import LaunchedRank
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly

# Note [Started driver]: torch.cuda.device_count asks NVML, or the CUDA driver if NVML does not
# answer. torch.cuda.is_available asks the driver, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set.
# Asking the driver starts it, and a started driver does not survive a fork: torch raises an error
# if the child uses CUDA. Only a forked child can tell whether the driver has been started (torch
# 2.13). If the driver found no GPU, ranks do not need it, so they are forked anyway, and fail with
# torch's error for a missing GPU (2.13, 2.15). tests/unit/ranks/test_gpus.py tests private names.

# The kernel drivers of NVIDIA and ROCm create these files, so without them there is no GPU.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Exit status of a forked child in which CUDA is unusable; other statuses are the child's answer.
_UNUSABLE = 255
_MOST = 254


def count_visible_gpus() -> int:
    """Return the number of visible GPUs; 0 if no GPU driver is installed."""
    # Importing torch takes seconds, so look for a driver first. Then ask torch in a forked child,
    # because asking it here could start the CUDA driver, which makes later forks unsafe.
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    import torch  # noqa: PLC0415  # as above

    count = _ask_in_forked_child(torch.cuda.device_count)
    # If this process has started the CUDA driver already, asking torch here does no further harm.
    return torch.cuda.device_count() if count == _UNUSABLE else count


def is_driver_started(torch: Any) -> bool:
    """Return whether this process has started the CUDA driver; see Note [Started driver]."""
    # CPU-only builds of torch lack this name, so skip the fork there.
    has_cuda = hasattr(torch._C, "_cuda_isInBadFork")  # noqa: SLF001  # tests/unit/ranks/test_gpus.py
    return has_cuda and _ask_in_forked_child(lambda: 0) == _UNUSABLE


@functools.cache
def get_gpu_error(torch: Any) -> str:
    """Start the driver; return torch's error for a missing GPU, or "" if there is a GPU."""
    # The error is cached for forked children, where torch would blame the fork instead. Do not call
    # device_count here, because it asks NVML instead of the driver.
    if getattr(torch._C, "_cuda_getDeviceCount", lambda: 1)():  # noqa: SLF001  # tests/unit/ranks/test_gpus.py
        return ""
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001  # the type depends on version and build
        return str(error)
    return ""


def blame_missing_gpu_in_errors() -> None:
    """Make CUDA errors in this process and its children blame the missing GPU, not the fork."""
    torch: Any = sys.modules.get("torch")
    is_in_bad_fork = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", lambda: False)
    text = get_gpu_error(torch) if is_in_bad_fork() else ""
    if not text:
        return

    def fail() -> None:
        __tracebackhide__ = True
        raise RuntimeError(text)

    torch.cuda._is_in_bad_fork = lambda: False  # noqa: SLF001  # as above
    torch._C._cuda_init = fail  # noqa: SLF001  # as above


def _ask_in_forked_child(ask: Callable[[], int]) -> int:
    """Call `ask` in a forked child; return its answer, or `_UNUSABLE` if CUDA is unusable there."""
    import torch  # noqa: PLC0415  # loaded already

    pid = fork_quietly()
    if pid == 0:
        status = _UNUSABLE
        try:
            if not torch.cuda._is_in_bad_fork():  # noqa: SLF001  # see is_driver_started
                status = min(ask(), _MOST)
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended) % 256


def count_usable_gpus(launched: LaunchedRank | None) -> int:
    """Return how many GPUs a test can use, assuming that all machines have the same number."""
    count = count_visible_gpus()
    return count if launched is None else count // launched.local_world_size * launched.world_size


def visible_gpu_names(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the indices or UUIDs of the first `count` visible GPUs, as the user wrote them."""
    # CUDA ignores the first invalid name and all names after it, so the first `count` are valid.
    listed = environment.get(visible_gpus_variable(environment))
    if listed is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in listed.split(","))[:count]


def visible_gpus_variable(environment: Mapping[str, str]) -> str:
    """Return the name of the environment variable that lists the visible GPUs."""
    # If both variables are set, torch uses the one for ROCm (torch 2.13).
    rocm = "HIP_VISIBLE_DEVICES"
    return rocm if rocm in environment else "CUDA_VISIBLE_DEVICES"
