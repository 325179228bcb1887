"""Finds which GPUs this process may use, without starting CUDA, and whether CUDA was started."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_fsdp_comm.launch_environment import LaunchedRank
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly

# Note [Started driver]: torch.cuda.device_count asks NVML, and the CUDA driver only where that does
# not answer; torch.cuda.is_available asks the driver, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is
# set. Asking starts the driver, which does not survive a fork: torch refuses CUDA in the child, and
# only a child can tell (torch 2.13). Where the driver found no GPU, ranks need nothing of it: they
# are forked all the same, and fail with torch's error for a missing GPU (read in 2.13 and 2.15).
# The private names have contract tests in tests/unit/ranks/test_gpus.py.

# What the NVIDIA and the ROCm kernel drivers create.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Exit statuses of a forked child; smaller ones are numbers.
_UNUSABLE = 255
_MOST = 254


def visible_gpu_count() -> int:
    """Number of GPUs in the caller's visible list; 0 without a driver."""
    # Importing torch takes seconds, so it is asked only on a machine with a driver, and in a forked
    # child, so that no answer makes a later fork unsafe.
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    import torch  # noqa: PLC0415  # as above

    count = _answer_of_child(torch.cuda.device_count)
    # Where CUDA has been started, asking here does no more harm.
    return torch.cuda.device_count() if count == _UNUSABLE else count


def is_driver_started(torch: Any) -> bool:
    """Whether this process has started the CUDA driver; see Note [Started driver]."""
    # Builds of torch without CUDA lack the name, and need no fork.
    has_cuda = hasattr(torch._C, "_cuda_isInBadFork")  # noqa: SLF001  # tests/unit/ranks/test_gpus.py
    return has_cuda and _answer_of_child(lambda: 0) == _UNUSABLE


@functools.cache
def no_gpu_error(torch: Any) -> str:
    """Start the driver; return torch's error for a missing GPU, empty if it found some."""
    # Cached, so that forked children know it, in which torch blames the fork.
    # Not device_count(), which may have it from NVML: the driver's word counts.
    if torch._C._cuda_getDeviceCount():  # noqa: SLF001  # tests/unit/ranks/test_gpus.py
        return ""
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001  # of several types, by version and build
        return str(error)
    return ""


def name_missing_gpu() -> None:
    """Make torch name a missing GPU, not the fork, in this process and its children."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda._is_in_bad_fork():  # noqa: SLF001  # as above
        return
    text = no_gpu_error(torch)
    if not text:
        return

    def fail() -> None:
        __tracebackhide__ = True
        raise RuntimeError(text)

    torch.cuda._is_in_bad_fork = lambda: False  # noqa: SLF001  # as above
    torch._C._cuda_init = fail  # noqa: SLF001  # as above


def _answer_of_child(ask: Callable[[], int]) -> int:
    """What a forked child answers, up to `_MOST`; `_UNUSABLE` if CUDA is unusable there."""
    import torch  # noqa: PLC0415  # the caller has loaded it

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


def usable_gpu_count(launched: LaunchedRank | None) -> int:
    """Number of GPUs that the ranks of a test may have, over all machines of a launcher."""
    count = visible_gpu_count()
    # A launcher's machines are alike.
    return count if launched is None else count // launched.local_world_size * launched.world_size


def visible_gpu_names(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The indices, or UUIDs where the caller wrote such, of the first `count` visible GPUs."""
    # CUDA ignores a list from the first wrong name on.
    listed = environment.get(visible_gpus_variable(environment))
    if listed is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in listed.split(","))[:count]


def visible_gpus_variable(environment: Mapping[str, str]) -> str:
    """The name of the environment variable that lists the visible GPUs."""
    # ROCm's own hides CUDA's from torch (torch 2.13).
    rocm = "HIP_VISIBLE_DEVICES"
    return rocm if rocm in environment else "CUDA_VISIBLE_DEVICES"
