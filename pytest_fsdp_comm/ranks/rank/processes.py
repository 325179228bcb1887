"""A rank as a process: forks, streams, random numbers, and what happens at its end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
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
    # Every session imports this module; these cost milliseconds.
    from pytest_fsdp_comm.gathering import Exchange
    from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec

# A socket's path has 108 bytes on Linux and 104 on macOS; ``/listener-`` and 8 more are added.
_LONGEST_DIRECTORY = 85


def fork_quietly() -> int:
    """`os.fork` without the warning that Python 3.12 gives wherever a thread lives."""
    # An xdist worker always has one, which never holds a lock that a rank needs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def flush_streams() -> None:
    """Flush both output streams, unless a test has closed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def redirect_output(spec: RankSetSpec, rank: int) -> None:
    """Send both output streams to files of a rank, which survive a crash; the input is empty."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        log = os.open(spec.log_path(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, descriptor)
        os.close(log)
        # What Python's own streams buffer would be lost in a crash.
        stream = open(  # noqa: SIM115  # lives as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def end_forked_child(rank_pid: int, error: BaseException | None) -> None:
    """End this process if it is not the rank's, but a test forked it, and it left the test."""
    if getpid() == rank_pid:
        return
    # At once: what follows (fixtures' teardown, exit handlers, coverage) is the rank's to do.
    status = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    flush_streams()
    os._exit(status)


def put_sockets_below(directory: Path) -> None:
    """Make managers, pools and servers put their sockets where they are removed in any case."""
    # Otherwise each process has a directory below TMPDIR, which a killed one leaves behind.
    process: Any = multiprocessing.process.current_process()
    config = getattr(process, "_config", None)
    # Private, read in Python 3.11 to 3.14: where it has moved, killed ranks leave directories.
    if isinstance(config, dict) and len(str(directory)) <= _LONGEST_DIRECTORY:
        config["tempdir"] = str(directory)


def run_finalizers() -> None:
    """End managers, pools and daemonic children; the other children are killed with the rank."""
    # Private, but what `multiprocessing` registers with `atexit` (read in Python 3.11 to 3.14).
    run: Any = getattr(multiprocessing.util, "_run_finalizers", None)
    if run is None:
        return
    run(0)
    for child in multiprocessing.process.active_children():
        if child.daemon:
            child.terminate()
            child.join()
    run()


# Note [End of a rank]: a rank leaves with os._exit, since unwinding would run what its parent
# registered. Without this module, exceptions that only a last garbage collection brings to light,
# and functions registered with atexit, would be lost.

# Plugins of pytest that keep exceptions which nobody can catch, and raise or warn of them at the
# end of each phase.
_KEEPERS = ("unraisableexception", "threadexception")


def raise_lost_exceptions(item: pytest.Item) -> None:
    """Collect garbage, then make pytest raise, or warn of, what finalizers and threads raised."""
    # It takes 0.2 ms after an empty test and 1.3 ms after an FSDP2 step, as what a rank was forked
    # with is frozen (torch 2.13, CPU).
    __tracebackhide__ = True
    gc.collect()
    for name in _KEEPERS:
        keeper: Any = item.config.pluginmanager.get_plugin(name)
        if keeper is not None:
            keeper.pytest_runtest_teardown(item=item)


def forget_exit_functions() -> None:
    """Leave what this process has registered with `atexit` so far to its parent."""
    for finalizer in weakref.finalize._select_for_exit():  # type: ignore[attr-defined]  # no public list
        finalizer.atexit = False
    atexit._clear()  # documented for tests only
    # Registered once a process, by the first finalizer.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # see above


def run_exit_functions() -> list[str]:
    """Run the exit functions since `forget_exit_functions`; a traceback for each that raised."""
    problems: list[str] = []

    def note(raised: sys.UnraisableHookArgs) -> None:
        what = f"{raised.err_msg or 'Exception ignored in'}: {raised.object!r}"
        lines = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
        problems.append(f"{what}\n\n{''.join(lines)}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        atexit._run_exitfuncs()  # as Python does at its end
    finally:
        sys.unraisablehook = before
    return problems


# Note [Equal draws]: models, data and sharding are drawn at random in many tests, and have to be
# the same on all ranks. A fork copies the states of numpy and torch, but Python makes a new one for
# each child, so that a rank gets the one of the pytest process back; spawned and launched ranks
# share no state at all, so that they compare theirs, and seed alike those libraries whose states
# differ. What all ranks were seeded with stays. Kept ranks begin each test with the states of the
# first.

_LARGEST_SEED = 2**32 - 1  # numpy's

_Generator: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]"
"""How to read, restore and seed a library's global generator."""


def _generators() -> tuple[_Generator, _Generator | None, _Generator]:
    """Those of Python, numpy and torch; None if numpy's is not loaded."""
    import torch  # noqa: PLC0415  # not in the pytest process

    numpy: Any = None
    if "numpy" in sys.modules:
        with contextlib.suppress(ImportError):
            numpy = importlib.import_module("numpy.random")
    return (
        (random.getstate, random.setstate, random.seed),
        (numpy.get_state, numpy.set_state, numpy.seed) if numpy else None,
        (torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
    )


def read_states() -> list[Any]:
    """This process's global random states; None for a library that is not loaded."""
    return [generator and generator[0]() for generator in _generators()]


def restore_states(states: Sequence[Any]) -> None:
    """Restore what `read_states` returned."""
    for generator, state in zip(_generators(), states, strict=True):
        if generator is not None and state is not None:
            generator[1](state)


def equalize(exchange: Exchange) -> None:
    """Seed alike the libraries whose states differ between ranks; every rank calls it."""
    # The text of a tensor leaves numbers out.
    own = [state.tolist() if hasattr(state, "tolist") else state for state in read_states()]
    digests = " ".join(hashlib.sha256(repr(state).encode()).hexdigest() for state in own)
    found = [text.split() for text in exchange.share("random", digests)]
    for generator, of_library in zip(_generators(), zip(*found, strict=True), strict=True):
        if generator is not None and len(set(of_library)) > 1:
            generator[2](int(of_library[0], 16) % _LARGEST_SEED)
