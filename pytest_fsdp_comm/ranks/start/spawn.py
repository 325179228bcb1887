"""Ranks as new processes, where what ran during collection makes a fork unsafe."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, RANK_VARIABLE, SPEC_VARIABLE
from pytest_fsdp_comm.options import Start, join_paths
from pytest_fsdp_comm.ranks.rank.gpus import is_driver_started, no_gpu_error, visible_gpus_variable
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly, redirect_output
from pytest_fsdp_comm.ranks.start.fork_server import ForkServer, serve
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec
from pytest_fsdp_comm.text.codec import dump_tagged

# Modules whose threads hold no lock that a rank needs: execnet's live in every xdist worker.
_HARMLESS_MODULES = ("execnet", "xdist", "coverage", "pytest_timeout", "pytest_rerunfailures")

_OMP_PAUSE_HARD = 2  # omp.h
_OPENMP_LIBRARY = re.compile(r"/\S*/lib[gi]?omp[^/\n]*$", re.MULTILINE)

# Note [Native threads]: polars, torch's inter-op pool and others start threads that `threading`
# does not list. A fork loses them, and a rank that waits for one hangs. Linux lists all threads in
# _TASKS; those without Python code are native. Five kinds do no harm: OpenMP's threads are ended
# here; OpenBLAS ends its own before a fork, so a child is forked that ends at once; jemalloc, which
# comes with pyarrow, and the pool that torch.set_num_threads makes (pthreadpool-cpp.cc in torch 2.6
# to 2.15) are made anew in the child. That pool's threads have no names, and are known by their
# number. NVML, which torch.cuda.device_count asks, starts one that is named as those of CUDA are
# (driver 580); whether CUDA itself runs, is_driver_started tells. Where _TASKS is missing, as on
# macOS, native threads are not noticed.
_TASKS = Path("/proc/self/task")
_HARMLESS_NATIVE = re.compile(r"jemalloc_bg_thd|cuda[0-9a-f]+")
# Threads that were told to end take a moment, longer on a busy machine. Where others stay, ranks
# are new processes anyway, which takes seconds.
_THREADS_END_WITHIN_S = 2.0


def unsafe_to_fork() -> str:
    """Say what a test module or conftest did at import that a fork does not survive; else "".

    Ends the threads of OpenMP, which a fork would not survive either.
    """
    _end_openmp_threads()
    threads = [thread for thread in threading.enumerate() if not _is_harmless(thread)]
    if threads:
        names = ", ".join(repr(thread.name) for thread in threads)
        return f"threads have been running since collection: {names}"
    return _unsafe_torch() or _unsafe_native_threads()


def _unsafe_torch() -> str:
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


def reason_to_spawn(start: Start) -> str:
    """Say why ranks are not forked; empty if they are, which nothing has to be done for."""
    if start == "spawn":
        return "the settings ask for new processes"
    reason = unsafe_to_fork()
    return "" if start == "fork" else reason


def _unsafe_native_threads() -> str:
    """Say which threads without Python code are left where a fork ends others; else ""."""
    if not _native_threads()[0]:
        return ""
    pid = fork_quietly()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    torch: Any = sys.modules.get("torch")
    num_pooled = 0 if torch is None else torch.get_num_threads() - 1
    until = time.monotonic() + _THREADS_END_WITHIN_S
    while True:
        count, names = _native_threads()
        if not count or (not names and count == num_pooled):
            return ""
        if time.monotonic() > until:
            shown = f": {', '.join(sorted(map(repr, names)))}" if names else ""
            return f"native threads ({count}) have been running since collection{shown}"
        time.sleep(0.01)


def _native_threads() -> tuple[int, set[str]]:
    """Count the threads that run no Python code, with the names that some have; 0 if unknown."""
    names = {}
    with contextlib.suppress(FileNotFoundError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                names[task.name] = (task / "comm").read_text().strip()
    names = {task: name for task, name in names.items() if not _HARMLESS_NATIVE.fullmatch(name)}
    # Not those of `threading`, which does not list execnet's.
    count = len(names) - len(sys._current_frames())  # noqa: SLF001  # documented for debuggers
    known = {str(thread.native_id) for thread in threading.enumerate()}
    # A thread that its library gave no name is called as the program is.
    unnamed = names.get(str(os.getpid()))
    return count, {names[task] for task in names.keys() - known} - {unnamed}


def _end_openmp_threads() -> None:
    """End the threads with which torch did maths, if any; they come back when it does more."""
    # A forked process takes them to be alive, and waits for them as soon as it uses more than one
    # thread: a rank that called torch.set_num_threads(2) hung (torch 2.13, CPU). Libraries such as
    # scikit-learn bring an OpenMP of their own.
    libraries: set[str | None] = {None}
    with contextlib.suppress(OSError):
        libraries |= {*_OPENMP_LIBRARY.findall(Path("/proc/self/maps").read_text())}
    for library in libraries:
        with contextlib.suppress(OSError, AttributeError):  # not loaded, or older than OpenMP 5.0
            ctypes.CDLL(library).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _is_harmless(thread: threading.Thread) -> bool:
    if thread is threading.main_thread() or thread is threading.current_thread():
        return True
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", "") or ""
    return module.split(".")[0] in _HARMLESS_MODULES or isinstance(
        thread,
        threading._DummyThread,  # noqa: SLF001  # execnet starts its threads in C
    )


def spawn_server(config: pytest.Config, directory: Path, terminal: tuple[int, ...]) -> ForkServer:
    """Start the process that starts ranks, with the arguments of this one."""
    arguments, environment = arguments_of(config)
    places = (str(directory), str(config.invocation_params.dir))

    def start(_: Connection, theirs: Connection) -> int:
        process = subprocess.Popen(  # noqa: S603  # this module itself
            [sys.executable, "-m", __name__, str(theirs.fileno()), *places, *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), *terminal),
            # Not a session of its own, whose ranks could not read the terminal.
            process_group=0,
        )
        # The server is waited for by its id; this object would warn that nobody has done so.
        process.returncode = 0
        return process.pid

    return ForkServer(start, directory)


def arguments_of(config: pytest.Config) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment with which pytest collects the same tests again."""
    # By now a path may exist, which moves the root directory where it is a word of its own.
    arguments = join_paths(map(str, config.invocation_params.args))
    from_environment = join_paths(shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    if config.pluginmanager.has_plugin("xdist"):
        arguments += ["-n", "0"]
    if config.pluginmanager.has_plugin("randomly"):
        # Each rank would choose a seed of its own.
        arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
    return arguments, {**os.environ, "PYTEST_ADDOPTS": shlex.join(from_environment)}


def main(descriptor: str, directory: str, *program: str) -> NoReturn:
    """Start ranks until the pytest process is gone.

    `program` is where pytest was started, then its arguments.
    """
    serve(
        Channel.inherited(int(descriptor)),
        lambda: partial(_become_rank, program),
        Path(directory),
        preloaded=(),
    )


def _become_rank(
    program: tuple[str, ...], spec: RankSetSpec, rank: int, descriptors: tuple[int, int]
) -> NoReturn:
    """Replace this process by a pytest process, whose half is in `rank.main`."""
    file = spec.directory / f"rank{rank}.json"
    file.write_text(dump_tagged(spec), encoding="utf-8")
    redirect_output(spec, rank)
    # A rank resolves its markers by what was launched, as the pytest process did.
    environment = {name: text for name, text in os.environ.items() if name != INSIDE_VARIABLE}
    environment |= {
        SPEC_VARIABLE: str(file),
        RANK_VARIABLE: f"{rank} {descriptors[0]} {descriptors[1]}",
    }
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)  # noqa: FBT003  # the function takes no keywords
    if spec.gpus:
        # Here already: what made forking unsafe may be that collecting starts CUDA.
        environment[visible_gpus_variable(environment)] = ",".join(spec.gpus)
    invoked_in, *arguments = program
    os.chdir(invoked_in)
    os.execve(  # noqa: S606  # pytest itself
        sys.executable, [sys.executable, "-m", "pytest", *arguments], environment
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
