"""Replaces the processes that a recorded script starts for the ranks of its host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.patches import Replacement, patch_attributes
from pytest_fsdp_comm.simulation.memory import SimulationError

_TARGET: Final = "_target"
"""Attribute of a process that holds its function (checked in Python 3.11 to 3.13)."""
_OF_PYTHON: Final = ("multiprocessing", "concurrent")


def process_patches() -> Iterator[Replacement]:
    """Yield replacements that run only this rank, and that make other started ranks fail."""
    package: Any = torch.multiprocessing
    # `package.spawn` is a function, which hides the module of the same name.
    for module in (package, sys.modules[package.start_processes.__module__]):
        yield module, "start_processes", simulated_start_processes
    yield BaseProcess, "start", _wrap_process_start(BaseProcess.start)


def simulated_start_processes(
    function: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int = 1,
    *_: object,
    **__: object,
) -> object:
    """Run `function` for this rank, instead of starting a process for each rank of this host."""
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    if nprocs != size:
        raise SimulationError(
            f"{find_call_site()}: expected one process for each of the {size} ranks of a host, "
            f"got {nprocs}: pass --local-world-size {nprocs}"
        )
    function(int(os.environ["LOCAL_RANK"]), *args)
    return SimpleNamespace(join=lambda *_, **__: True, processes=[])


def _wrap_process_start(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    def run(process: BaseProcess) -> None:
        function = vars(process).get(_TARGET)
        module = str(getattr(function, "__module__", ""))
        if function is not None and not module.startswith(_OF_PYTHON):
            vars(process)[_TARGET] = _StartedFunction(function, find_call_site())
        start(process)

    return run


class _StartedFunction:
    """The function of a started process, which fails if the process turns out to be a rank."""

    def __init__(self, function: Callable[..., object], site: str) -> None:
        self._function, self._site = function, site

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Code that has imported `init_process_group` by name reaches `rendezvous`.
        names = ("init_process_group", "rendezvous")
        patches: list[Replacement] = [(distributed_c10d, name, self._refuse) for name in names]
        patches.append((dist, "init_process_group", self._refuse))
        # A forked process is still simulated, but a new one has no GPU.
        if not SimulationError.is_in_script:
            patches.append((torch.cuda, "set_device", self._refuse))
        with patch_attributes(*patches):
            return self._function(*args, **kwargs)

    def _refuse(self, *_: object, **__: object) -> None:
        raise SimulationError(
            f"{self._site}: expected ranks that torch.multiprocessing.spawn starts, got a "
            "multiprocessing.Process that creates a process group or selects a GPU: use spawn, "
            "which runs only the simulated rank, or call the function of that process for the "
            "rank in LOCAL_RANK"
        )
