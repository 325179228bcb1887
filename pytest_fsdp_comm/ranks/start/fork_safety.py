"""Tells whether ranks may be forked from this process."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from typing import Any

from pytest_fsdp_comm.ranks.rank.gpus import is_driver_started, no_gpu_error

# Modules whose threads hold no lock that a rank needs: execnet's live in every xdist worker.
_HARMLESS_MODULES = ("execnet", "xdist", "coverage", "pytest_timeout", "pytest_rerunfailures")

_OMP_PAUSE_HARD = 2  # omp.h


def unsafe_to_fork() -> str:
    """Say what a test module or conftest did at import that a fork does not survive; else ""."""
    threads = [thread for thread in threading.enumerate() if not _is_harmless(thread)]
    if threads:
        names = ", ".join(repr(thread.name) for thread in threads)
        return f"threads have been running since collection: {names}"
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.cuda.is_initialized():
        return "CUDA was initialised during collection"
    # Where it found no GPU, nothing was started: ranks that use none do not need it.
    if is_driver_started(torch) and not no_gpu_error(torch):
        return (
            "the CUDA driver was started during collection (torch.cuda.is_available() does that, "
            "unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set in the environment)"
        )
    # torch.distributed is a package without a group API where torch was built without it.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group was made during collection"
    return ""


def end_openmp_threads() -> None:
    """End the threads with which torch did maths, if any; they come back when it does more."""
    # A forked process takes them to be alive, and waits for them as soon as it uses more than one
    # thread: a rank that called torch.set_num_threads(2) hung (torch 2.13, CPU).
    with contextlib.suppress(AttributeError):  # OpenMP is not loaded, or older than 5.0
        ctypes.CDLL(None).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _is_harmless(thread: threading.Thread) -> bool:
    if thread is threading.main_thread() or thread is threading.current_thread():
        return True
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", "") or ""
    return module.split(".")[0] in _HARMLESS_MODULES or isinstance(
        thread,
        threading._DummyThread,  # noqa: SLF001  # execnet starts its threads in C
    )
