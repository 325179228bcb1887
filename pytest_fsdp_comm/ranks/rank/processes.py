"""Helpers for the process of a rank: forks, streams, random states and exit."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import multiprocessing.process
import multiprocessing.util
import os
import random
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    # Every session imports this module, and these imports take milliseconds.
    from pytest_fsdp_comm.gathering import Exchange
    from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec

# Longest path of a directory for multiprocessing's sockets: a socket's path has at most 108 bytes
# on Linux (macOS: 104), of which ``/listener-`` and a random suffix take 18.
_LONGEST_DIRECTORY = 85


def fork_quietly() -> int:
    """Call `os.fork`; suppress the warning of Python 3.12 and later about running threads."""
    flush_streams()  # otherwise the child would print this process's buffered output, too
    # An xdist worker always has a second thread, but that thread holds no lock that a rank needs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def flush_streams() -> None:
    """Flush stdout and stderr, unless a test has closed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def redirect_output(spec: RankSetSpec, rank: int) -> None:
    """Redirect stdout and stderr to the rank's log files; read stdin from the null device."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        log = os.open(spec.log_path(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, descriptor)
        os.close(log)
        # Use line buffering, because a crash would lose the larger buffers of default streams.
        stream = open(  # noqa: SIM115  # lives as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def end_forked_child(rank_pid: int, error: BaseException | None) -> None:
    """Exit if this process is not the rank itself, but a child that the test forked."""
    if getpid() == rank_pid:
        return
    # Exit now: only the rank itself may tear down fixtures, run exit functions and save coverage.
    status = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    flush_streams()
    os._exit(status)


def put_sockets_below(directory: Path) -> None:
    """Make multiprocessing's managers and pools create their sockets below `directory`."""
    # By default, each process creates a directory in TMPDIR, and leaves it there if it is killed.
    process: Any = multiprocessing.process.current_process()
    config = getattr(process, "_config", None)
    # `_config` is private (checked in Python 3.11 to 3.14). If it has moved, multiprocessing still
    # creates those directories.
    if isinstance(config, dict) and len(str(directory)) <= _LONGEST_DIRECTORY:
        config["tempdir"] = str(directory)


def run_finalizers() -> None:
    """End managers, pools and daemonic children, as multiprocessing does at exit."""
    # Other children are killed with the rank. `_run_finalizers` is private (Python 3.11 to 3.14).
    run: Any = getattr(multiprocessing.util, "_run_finalizers", None)
    if run is None:
        return
    run(0)
    for child in multiprocessing.process.active_children():
        if child.daemon:
            child.terminate()
            child.join()
    run()


# A rank ends with os._exit, because a normal exit would also run exit functions that belong to its
# parent. So the functions below do what Python does at exit: they collect garbage, whose finalizers
# can raise exceptions, and run the exit functions that were registered in the rank.

# pytest's plugins that report exceptions from finalizers and threads after each phase.
_EXCEPTION_PLUGINS = ("unraisableexception", "threadexception")


def raise_lost_exceptions(item: pytest.Item) -> None:
    """Collect garbage, then let pytest report exceptions from finalizers and threads."""
    # This takes only 0.2 ms after an empty test and 1.3 ms after an FSDP2 step, because the garbage
    # collector skips objects that are older than the rank (`gc.freeze`).
    __tracebackhide__ = True
    gc.collect()
    for name in _EXCEPTION_PLUGINS:
        plugin: Any = item.config.pluginmanager.get_plugin(name)
        if plugin is not None:
            plugin.pytest_runtest_teardown(item=item)


def forget_exit_functions() -> None:
    """Unregister all `atexit` functions in this process, because its parent runs them."""
    for finalizer in weakref.finalize._select_for_exit():  # type: ignore[attr-defined]  # no public list
        finalizer.atexit = False
    atexit._clear()  # documented for tests only
    # weakref.finalize registers this function only once per process, so register it again here.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # see above


def run_exit_functions() -> list[str]:
    """Run exit functions registered since `forget_exit_functions`; return a text for each error."""
    problems: list[str] = []

    def note(raised: sys.UnraisableHookArgs) -> None:
        title = f"{raised.err_msg or 'Exception ignored in'}: {raised.object!r}"
        lines = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
        problems.append(f"{title}\n\n{''.join(lines)}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        atexit._run_exitfuncs()  # as Python does at exit
    finally:
        sys.unraisablehook = before
    return problems


# Many tests create models and data from random numbers, which must be equal on all ranks. A fork
# copies the random states of numpy and torch, but Python reseeds `random`, so `RankTemplate`
# restores its state. Spawned and launched ranks do not inherit random states, so they compare them.
# If a library's states differ, all ranks seed it with the same number; if the user has seeded it
# equally, they leave it alone. If ranks run several tests, each starts with the first test's state.

_LARGEST_SEED = 2**32 - 1  # the largest seed that numpy accepts

_Generator: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]"
"""Functions to read, restore and seed a library's global generator."""


def _random_generators() -> tuple[_Generator, _Generator | None, _Generator]:
    """Return the generators of Python, numpy (None if it is not loaded) and torch."""
    import torch  # noqa: PLC0415  # not in the pytest process

    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    return (
        (random.getstate, random.setstate, random.seed),
        (numpy.get_state, numpy.set_state, numpy.seed) if numpy else None,
        (torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
    )


def read_random_states() -> list[object]:
    """Return the global random states of this process; None for a library that is not loaded."""
    return [generator and generator[0]() for generator in _random_generators()]


def restore_random_states(states: Sequence[object]) -> None:
    """Restore the random states that `read_random_states` returned."""
    for generator, state in zip(_random_generators(), states, strict=True):
        if generator is not None and state is not None:
            generator[1](state)


def equalize_random_states(exchange: Exchange) -> None:
    """Make the random states of all ranks equal; every rank of the test has to call this."""
    # The repr of a tensor omits elements, so convert the tensor to a list.
    states = [
        state.tolist() if hasattr(state, "tolist") else state for state in read_random_states()
    ]
    digests = " ".join(hashlib.sha256(repr(state).encode()).hexdigest() for state in states)
    by_rank = [text.split() for text in exchange.share("random", digests)]
    for generator, by_library in zip(_random_generators(), zip(*by_rank, strict=True), strict=True):
        if generator is not None and len(set(by_library)) > 1:
            generator[2](int(by_library[0], 16) % _LARGEST_SEED)
