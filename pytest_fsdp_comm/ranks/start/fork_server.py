"""The fork server: one quiet, single-threaded process from which all ranks are forked.

It is forked from the pytest process after collection, before any test ran: at that moment the
process holds the collected items, and no test has yet started a thread, done maths or touched CUDA,
each of which makes a later fork hang or crash.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.start.ending import (
    HURRIED_S,
    adopt_orphans,
    is_gone,
    kill,
    kill_children,
    kill_groups,
)
from pytest_fsdp_comm.ranks.start.slots import HeldSlots
from pytest_fsdp_comm.ranks.wire.launch import Launch

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.channel import Channel

# Imported once here, they cost nothing in a rank: an FSDP2 step in a fresh rank took 1.89 s without
# and 0.18 s with them (torch 2.13, CPU).
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.device_mesh",
    "torch.testing._internal.distributed.fake_pg",
)

# How soon kept ranks give up slots that another process waits for.
_WANTED_POLL_S = 0.05
_HUNG_UP_POLL_S = 0.05

RunRank = Callable[[Launch, int], Any]


def fork_quietly() -> int:
    """`os.fork` without the warning that Python 3.12 gives wherever a thread lives.

    An xdist worker always has one, which never holds a lock that a rank needs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def serve(channel: Channel, prepare: Callable[[], RunRank], directory: Path) -> NoReturn:
    """The server's life: forks and reaps until the pytest process is gone."""
    # Ctrl-C reaches the whole foreground group; the pytest process decides and then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A launcher ends the whole group with SIGTERM, and then, too, the pytest process decides.
    at_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    adopt_orphans()
    server: _Server | None = None
    status = 0
    try:
        for name in PRELOADED:
            # What is missing is missed by the ranks that use it: torch.distributed.tensor.debug,
            # say, wants numpy, which torch does not.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        server = _Server(channel, prepare(), at_sigterm)
        # What is here now lives as long as each rank: without this, a rank's first full collection
        # walks through it, and copies the pages of a million objects (see `gc.freeze`).
        gc.collect()
        gc.freeze()
        server.run()
    except BaseException as error:  # noqa: BLE001  # nothing may unwind into the copied session
        told = str(error) if isinstance(error, FsdpCommError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            channel.send({"died": told})
        status = 1
    finally:
        if server is not None:
            server.kill_all()
        # Also where the pytest process was killed and could not.
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(status)


class _Server:
    def __init__(self, channel: Channel, run_rank: RunRank, at_sigterm: Any) -> None:
        self._channel = channel
        self._run_rank = run_rank
        self._at_sigterm = at_sigterm
        self._sets: dict[int, dict[int, int]] = {}  # set -> rank -> pid, unreaped ranks only
        self._groups: dict[int, list[int]] = {}  # set -> process groups that it may have left
        # The ranks' slots are held here: freed when the last rank is reaped, and, should this
        # process be killed, by the kernel, as the ranks die with it.
        self._held: dict[int, HeldSlots] = {}
        self._resting: set[int] = set()
        self._unended: list[int] = []  # killed in vain, by process id
        self._wakeup, write_end = socket.socketpair()
        self._wakeup.settimeout(0.0)
        write_end.settimeout(0.0)
        self._write_end = write_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            waiting: list[Any] = [self._channel, self._wakeup]
            gives_up = any(self._held[number].holds_any for number in self._resting)
            readable, _, _ = select.select(waiting, [], [], _WANTED_POLL_S if gives_up else None)
            if self._wakeup in readable:
                self._wakeup.recv(4096)
                self._reap()
            if self._channel in readable:
                messages = self._channel.receive_available()
                for message in messages:
                    self._handle(message)
                if self._channel.is_closed:
                    return
            # After the messages: ranks that have just been resumed are not resting any more.
            for number in [n for n in self._resting if self._held[n].are_wanted]:
                self._kill(number, within_s=HURRIED_S)

    def kill_all(self) -> None:
        for number in list(self._groups):
            self._kill(number, within_s=HURRIED_S)

    def _handle(self, message: dict[str, Any]) -> None:
        if "launch" in message:
            self._fork(message["launch"], Launch.load(message["of"]))
        elif "rest" in message:
            self._resting.add(message["rest"])
        elif "resume" in message:
            number = message["resume"]
            self._resting.discard(number)
            self._channel.send({"set": number, "resumed": number in self._groups})
        else:
            alive = self._kill(message["end"], within_s=message["within_s"])
            self._channel.send({"set": message["end"], "alive": alive})

    def _fork(self, number: int, launch: Launch) -> None:
        pids = {}
        self._held[number] = HeldSlots(launch.slots)
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in launch.ranks:
            pid = fork_quietly()
            if pid == 0:
                self._become_rank(launch, rank)
            # Also done by the rank itself; whichever comes first, a kill of the group finds it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            pids[rank] = pid
        self._sets[number] = dict(pids)
        self._groups[number] = list(pids.values())
        self._channel.send({"set": number, "pids": pids})

    def _become_rank(self, launch: Launch, rank: int) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, self._at_sigterm or signal.SIG_DFL)
            # A descriptor of the pytest process's end would keep it from seeing the server's death.
            self._channel.close()
            self._wakeup.close()
            self._write_end.close()
            for held in self._held.values():
                held.forget()
            self._run_rank(launch, rank)
        except BaseException:  # noqa: BLE001  # nothing may unwind into the copied pytest session
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for number, pids in self._sets.items():
            for rank, pid in list(pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del pids[rank]
                    code = os.waitstatus_to_exitcode(status)
                    self._channel.send({"set": number, "exited": rank, "status": code})

    def _kill(self, number: int, *, within_s: float) -> dict[int, int]:
        """Kills what a set of ranks left, and frees its slots.

        Returns:
            Process ids of the ranks that are not gone in time.
        """
        pids = self._sets.pop(number, {})
        # The groups of ranks that ended too: what a test forked must not outlive it. A rank may
        # have left its group.
        kill_groups(self._groups.pop(number, ()))
        kill(pids.values())
        alive = self._await_ends(pids, within_s)
        running = [pid for others in self._sets.values() for pid in others.values()]
        self._unended += alive.values()
        # Each is waited for once.
        self._unended += kill_children([*running, *self._unended], within_s=HURRIED_S)
        self._resting.discard(number)
        if number in self._held:
            self._held.pop(number).release()
        return alive

    def _await_ends(self, pids: Mapping[int, int], within_s: float) -> dict[int, int]:
        until = time.monotonic() + within_s
        while True:
            left = {rank: pid for rank, pid in pids.items() if not is_gone(pid)}
            now = time.monotonic()
            if not left or now > until:
                break
            if self._channel.is_hung_up():
                until = min(until, now + HURRIED_S)
            if select.select([self._wakeup], [], [], _HUNG_UP_POLL_S)[0]:
                self._wakeup.recv(4096)
        # The bytes that told of these may have told of others, too.
        self._reap()
        return left
