"""Starts ranks as new processes, for sessions in which collection has made a fork unsafe."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
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
from pytest_fsdp_comm.ranks.rank.gpus import get_gpu_error, is_driver_started, visible_gpus_variable
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly, redirect_output
from pytest_fsdp_comm.ranks.start.fork_server import ForkServer, serve
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec
from pytest_fsdp_comm.text.codec import dump_tagged

# Threads of these modules do not make a fork unsafe, because they hold no lock that a rank needs.
# Every xdist worker has threads of execnet.
_HARMLESS_MODULES = ("execnet", "xdist", "coverage", "pytest_timeout", "pytest_rerunfailures")

_OMP_PAUSE_HARD = 2  # omp.h
_OPENMP_LIBRARY = re.compile(r"/\S*/lib[gi]?omp[^/\n]*$", re.MULTILINE)

# polars, torch's inter-op pool and other libraries start threads that `threading` does not list. A
# forked child lacks them, so a rank that waits for such a thread hangs. Linux lists all threads in
# _TASKS; those that run no Python code are native. Five kinds of native threads are harmless:
# - OpenMP: _end_openmp_threads ends its threads.
# - OpenBLAS: it ends its threads before a fork, so _find_unsafe_native_threads forks a child once.
# - jemalloc (part of pyarrow), and the pool of torch.set_num_threads (pthreadpool-cpp.cc in torch
#   2.7 to 2.15): a forked child starts new threads. The pool's threads have no names, so we compare
#   their number.
# - NVML, which torch.cuda.device_count queries. Its thread has the same name as threads of CUDA
#   (driver 580), so names do not reveal CUDA's threads; `_find_unsafe_torch_state` detects CUDA
#   instead.
# macOS has no _TASKS, so native threads are not detected there.
_TASKS = Path("/proc/self/task")
_HARMLESS_NATIVE = re.compile(r"jemalloc_bg_thd|cuda[0-9a-f]+")
# How long to wait for threads to end; long enough for a busy machine.
_THREADS_END_WITHIN_S = 2.0


def find_reason_not_to_fork() -> str:
    """End OpenMP's threads, then return why a fork is still unsafe; "" if it is safe."""
    _end_openmp_threads()
    threads = [thread for thread in threading.enumerate() if not _is_harmless_thread(thread)]
    if threads:
        names = ", ".join(repr(thread.name) for thread in threads)
        return f"threads have been running since collection: {names}"
    return _find_unsafe_torch_state() or _find_unsafe_native_threads()


def _find_unsafe_torch_state() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.cuda.is_initialized():
        return "CUDA was initialized during collection"
    # A started driver does not survive a fork. If it found no GPU, that does not matter, because
    # ranks cannot use CUDA anyway.
    if is_driver_started(torch) and not get_gpu_error(torch):
        return (
            "the CUDA driver was started during collection (torch.cuda.is_available() does that, "
            "unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set in the environment)"
        )
    # A torch built without distributed support has no is_initialized.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group was created during collection"
    return ""


def find_reason_to_spawn(start: Start) -> str:
    """Return why ranks must be spawned; "" if they can be forked."""
    if start == "spawn":
        return "the settings ask for new processes"
    reason = find_reason_not_to_fork()
    return "" if start == "fork" else reason


def _find_unsafe_native_threads() -> str:
    if not _count_and_name_native_threads()[0]:
        return ""
    pid = fork_quietly()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    torch: Any = sys.modules.get("torch")
    num_pooled = 0 if torch is None else torch.get_num_threads() - 1
    until = time.monotonic() + extend_under_load(_THREADS_END_WITHIN_S)
    while True:
        count, names = _count_and_name_native_threads()
        if not count or (not names and count == num_pooled):
            return ""
        if time.monotonic() > until:
            listed = f": {', '.join(sorted(map(repr, names)))}" if names else ""
            return f"native threads ({count}) have been running since collection{listed}"
        time.sleep(0.01)


def _count_and_name_native_threads() -> tuple[int, set[str]]:
    """Return the number of threads that run no Python code (0 if unknown), and their names."""
    names = {}
    with contextlib.suppress(FileNotFoundError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                names[task.name] = (task / "comm").read_text().strip()
    names = {task: name for task, name in names.items() if not _HARMLESS_NATIVE.fullmatch(name)}
    # Count Python threads by their frames, because `threading` does not list execnet's threads.
    count = len(names) - len(sys._current_frames())  # noqa: SLF001  # documented for debuggers
    listed = {str(thread.native_id) for thread in threading.enumerate()}
    # A thread that was never named has the program's name, like the main thread.
    unnamed = names.get(str(os.getpid()))
    return count, {names[task] for task in names.keys() - listed} - {unnamed}


def _end_openmp_threads() -> None:
    """End OpenMP's threads; OpenMP starts new threads when it needs them."""
    # A forked process lacks these threads, but OpenMP would wait for them once it used more than
    # one thread: a rank that called torch.set_num_threads(2) hung (torch 2.13, CPU). Libraries such
    # as scikit-learn bundle a copy of OpenMP, so end the threads of every loaded copy.
    libraries: set[str | None] = {None}
    with contextlib.suppress(OSError):
        libraries |= {*_OPENMP_LIBRARY.findall(Path("/proc/self/maps").read_text())}
    for library in libraries:
        with contextlib.suppress(OSError, AttributeError):  # not loaded, or before OpenMP 5.0
            ctypes.CDLL(library).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _is_harmless_thread(thread: threading.Thread) -> bool:
    if thread is threading.main_thread() or thread is threading.current_thread():
        return True
    run: Any = getattr(thread, "_target", None) or type(thread).run
    module = getattr(run, "__module__", "") or ""
    return module.split(".")[0] in _HARMLESS_MODULES or isinstance(
        thread,
        threading._DummyThread,  # noqa: SLF001  # execnet starts its threads in C
    )


def spawn_server(config: pytest.Config, directory: Path, terminal: tuple[int, ...]) -> ForkServer:
    """Start a process that spawns ranks; each rank gets this pytest process's arguments."""
    arguments, environment = arguments_of(config)
    paths = (str(directory), str(config.invocation_params.dir))

    def start(_: Connection, theirs: Connection) -> int:
        process = subprocess.Popen(  # noqa: S603  # this module itself
            [sys.executable, "-m", __name__, str(theirs.fileno()), *paths, *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), *terminal),
            # Do not start a new session, because ranks could not read the terminal from there.
            process_group=0,
        )
        # `ForkServer` reaps the process. The returncode keeps Popen from warning that the process
        # is still running.
        process.returncode = 0
        return process.pid

    return ForkServer(start, directory)


def arguments_of(config: pytest.Config) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment for a pytest process that collects the same tests."""
    # If an option's value is a separate argument that is also an existing path, pytest computes the
    # rootdir from it. So join options and values.
    arguments = join_paths(map(str, config.invocation_params.args))
    from_environment = join_paths(shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    if config.pluginmanager.has_plugin("xdist"):
        arguments += ["-n", "0"]
    if config.pluginmanager.has_plugin("randomly"):
        # Pass the seed, because each rank would otherwise choose a different seed.
        arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
    return arguments, {**os.environ, "PYTEST_ADDOPTS": shlex.join(from_environment)}


def main(descriptor: str, directory: str, *program: str) -> NoReturn:
    """Spawn ranks until pytest is gone; `program` is pytest's working directory and arguments."""
    serve(
        Channel.inherit(int(descriptor)),
        lambda: partial(_exec_rank, program),
        Path(directory),
        preloaded=(),
    )


def _exec_rank(
    program: tuple[str, ...], spec: RankSetSpec, rank: int, descriptors: tuple[int, int]
) -> NoReturn:
    """Replace this process with a pytest process that runs `rank.main.run_spawned_rank`."""
    file = spec.directory / f"rank{rank}.json"
    file.write_text(dump_tagged(spec), encoding="utf-8")
    redirect_output(spec, rank)
    # Remove INSIDE_VARIABLE, so that the rank resolves its markers as the pytest process did.
    environment = {name: text for name, text in os.environ.items() if name != INSIDE_VARIABLE}
    environment |= {
        SPEC_VARIABLE: str(file),
        RANK_VARIABLE: f"{rank} {descriptors[0]} {descriptors[1]}",
    }
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)  # noqa: FBT003  # the function takes no keywords
    if spec.gpus:
        # Set the visible GPUs now, because collecting tests in the rank can initialize CUDA.
        environment[visible_gpus_variable(environment)] = ",".join(spec.gpus)
    # Before the rank can dump its stack, the supervisor's signal must not end it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    invoked_in, *arguments = program
    os.chdir(invoked_in)
    os.execve(  # noqa: S606  # pytest itself
        sys.executable, [sys.executable, "-m", "pytest", *arguments], environment
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
