"""Counts the GPUs that this process may use, without starting CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        launched: This process's place in a launch, whose machines are taken to be alike; None if
            all ranks are on this machine.
    """
    count = visible_gpu_count()
    return count if launched is None else count // launched.local_world_size * launched.world_size
