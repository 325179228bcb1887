"""Skips the saves of a recorded script, and runs only one of the ranks that the script starts."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pytest_fsdp_comm.comm.events import SKIPPED
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.patches import Replacement, patch_attributes, wrap_attribute
from pytest_fsdp_comm.recording.value_dependence import add_assumption
from pytest_fsdp_comm.simulation.memory import SimulationError

_CHECKPOINT: Final = "torch.distributed.checkpoint"
_CHECKPOINTS: Final = ("save", "async_save", "save_state_dict")
_TARGET: Final = "_target"
"""Attribute of a process that holds its function (checked in Python 3.11 to 3.13)."""
_OF_PYTHON: Final = ("multiprocessing", "concurrent")


class SkippedSaves:
    """The saves that a simulated rank has skipped; `str` returns a note, empty without saves."""

    def __init__(self) -> None:
        self._calls: dict[str, None] = {}

    def __str__(self) -> str:
        if not self._calls:
            return ""
        calls = ", ".join(self._calls)
        return f"note: a simulated rank has no data to save, so these calls wrote nothing: {calls}"

    def patches(self) -> Iterator[Replacement]:
        """Yield the arguments of `setattr` for each function that saves tensors."""
        yield wrap_attribute(torch, "save", self._save_or_skip)
        # Import these here, because most simulations save nothing.
        for path in (_CHECKPOINT, f"{_CHECKPOINT}.state_dict_saver"):
            module = importlib.import_module(path)
            for name in _CHECKPOINTS:
                yield wrap_attribute(module, name, self._skip_checkpoint)
        with contextlib.suppress(ImportError):
            safetensors = importlib.import_module("safetensors.torch")
            for name in ("save", "save_file"):
                yield wrap_attribute(safetensors, name, self._save_or_skip_safetensors)

    def _note_skipped_save(self, how: str) -> None:
        self._calls[f"{find_call_site()} ({how})"] = None

    def _save_or_skip(
        self, save: Callable[..., None], obj: object, f: object, *args: Any, **kwargs: Any
    ) -> None:
        try:
            # torch notices simulated tensors only after it has replaced the file.
            save(obj, io.BytesIO(), *args, **kwargs)
        except SimulationError:
            self._note_skipped_save("torch.save")
        else:
            save(obj, f, *args, **kwargs)

    def _skip_checkpoint(self, save: Callable[..., object], *_: object, **__: object) -> object:
        # Ranks exchange their plans for a checkpoint, even if it contains no tensors.
        how = f"torch.distributed.checkpoint.{save.__name__}"
        self._note_skipped_save(how)
        add_assumption(SKIPPED, how)
        done: Future[None] = Future()
        done.set_result(None)
        return done if save.__name__ == "async_save" else None

    def _save_or_skip_safetensors(
        self, save: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        try:
            return save(*args, **kwargs)
        except SimulationError:
            self._note_skipped_save(f"safetensors.torch.{save.__name__}")
            return b"" if save.__name__ == "save" else None


def process_patches() -> Iterator[Replacement]:
    """Yield replacements that run only this rank, and that make other started ranks fail."""
    package: Any = torch.multiprocessing
    # `package.spawn` is a function, which hides the module of the same name.
    for module in (package, sys.modules[package.start_processes.__module__]):
        yield module, "start_processes", simulated_start_processes
    yield wrap_attribute(BaseProcess, "start", _simulated_process_start)


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


def _simulated_process_start(start: Callable[[BaseProcess], None], process: BaseProcess) -> None:
    function = vars(process).get(_TARGET)
    module = str(getattr(function, "__module__", ""))
    if function is not None and not module.startswith(_OF_PYTHON):
        vars(process)[_TARGET] = functools.partial(_run_unless_rank, function, find_call_site())
    start(process)


def _run_unless_rank(
    function: Callable[..., object], site: str, /, *args: object, **kwargs: object
) -> object:
    """Run the function of a started process, but fail if the process turns out to be a rank."""

    def refuse(*_: object, **__: object) -> None:
        raise SimulationError(
            f"{site}: expected ranks that torch.multiprocessing.spawn starts, got a "
            "multiprocessing.Process that creates a process group or selects a GPU: use spawn, "
            "which runs only the simulated rank, or call the function of that process for the "
            "rank in LOCAL_RANK"
        )

    # Code that has imported `init_process_group` by name reaches `rendezvous`.
    names = ("init_process_group", "rendezvous")
    patches: list[Replacement] = [(distributed_c10d, name, refuse) for name in names]
    patches.append((dist, "init_process_group", refuse))
    # A forked process is still simulated, but a new one has no GPU.
    if not SimulationError.is_in_script:
        patches.append((torch.cuda, "set_device", refuse))
    with patch_attributes(*patches):
        return function(*args, **kwargs)
