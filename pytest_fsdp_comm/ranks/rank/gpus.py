"""Finds which GPUs this process may use, without starting CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.launch_environment import LaunchedRank

# What the NVIDIA and the ROCm kernel drivers create.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def visible_gpu_count() -> int:
    """Number of GPUs in the caller's visible list; 0 without a driver.

    Importing torch takes seconds, so it is only asked on a machine with a driver.
    ``torch.cuda.device_count`` asks NVML and honours ``CUDA_VISIBLE_DEVICES`` without creating a
    CUDA context, which would make a later fork unsafe (torch 2.6 to 2.13 read).
    """
    if not any(file.exists() for file in _DRIVER_FILES):
        return 0
    import torch  # noqa: PLC0415  # see the docstring

    return torch.cuda.device_count()


def usable_gpu_count(launched: LaunchedRank | None) -> int:
    """Number of GPUs that the ranks of a test may have, over all machines.

    Args:
        launched: This process's rank, where a launcher started one on machines that are alike; None
            if all ranks are on this machine.
    """
    count = visible_gpu_count()
    return count if launched is None else count // launched.local_world_size * launched.world_size


def visible_gpu_names(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The names of the caller's visible GPUs.

    Args:
        environment: The process's environment variables.
        count: How many of the listed GPUs there are; CUDA ignores the rest of a list from the first
            wrong name on.

    Returns:
        Indices, or UUIDs where the caller wrote such.
    """
    listed = environment.get(visible_gpus_variable(environment))
    if listed is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in listed.split(","))[:count]


def visible_gpus_variable(environment: Mapping[str, str]) -> str:
    """The environment variable that lists the visible GPUs.

    ROCm's own variable hides CUDA's from torch (torch 2.13).
    """
    rocm = "HIP_VISIBLE_DEVICES"
    return rocm if rocm in environment else "CUDA_VISIBLE_DEVICES"
