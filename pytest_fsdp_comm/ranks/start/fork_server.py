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
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import getpid
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.start.ending import (
    HURRIED_S,
    PATIENCE_S,
    adopt_orphans,
    end_with_parent,
    is_gone,
    kill,
    kill_children,
    kill_groups,
)
from pytest_fsdp_comm.ranks.start.huge_pages import collapse_memory
from pytest_fsdp_comm.ranks.start.slots import HeldSlots, SharedDirectory
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.directories import remove_directory
from pytest_fsdp_comm.ranks.wire.messages import (
    SPARE,
    SPARES_OWNER,
    BecomeRank,
    EndSet,
    RankExited,
    RestSet,
    ResumeSet,
    ServerFailed,
    SetEnded,
    SetResumed,
    SetStarted,
    StartSet,
)
from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.messages import ServerRequest

    _Channel: TypeAlias = Channel[ServerRequest]

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
# Moving everything takes as long as huge pages save within about 60 ranks; a session that starts
# fewer should not pay for it.
_COLLAPSES_AFTER_RANKS = 32

RunRank = Callable[[RankSetSpec, int], NoReturn]
"""What a process does as a rank, after its fork."""


def fork_quietly() -> int:
    """`os.fork` without the warning that Python 3.12 gives wherever a thread lives.

    An xdist worker always has one, which never holds a lock that a rank needs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def serve(
    channel: _Channel,
    prepare: Callable[[], RunRank],
    directory: Path,
    shared: Path | None = None,
    *,
    preloaded: Sequence[str],
) -> NoReturn:
    """Forks and reaps until the pytest process is gone, and ends this process.

    Args:
        channel: To the pytest process.
        prepare: Does here what every rank would do first, and returns what each does after its
            fork.
        directory: Removed in the end.
        shared: The slots' directory, if other sessions use it too: removed by the last one.
        preloaded: Modules that every rank would import.
    """
    # A terminal that is closed sends SIGHUP to the session's group, and who ends a group may send
    # SIGKILL to all of it: this process has to survive the pytest process, and clean up after it.
    at_sighup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # started as a group of its own
        os.setpgid(0, 0)
    # Ctrl-C reaches the whole foreground group; the pytest process decides and then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A launcher ends the whole group with SIGTERM, and then, too, the pytest process decides.
    at_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    adopts = adopt_orphans()
    users = SharedDirectory(shared) if shared is not None else None
    server: _Server | None = None
    status = 0
    collects = gc.isenabled()
    try:
        # Nothing of what is imported is garbage: looking for some takes a third of the time.
        gc.disable()
        for name in preloaded:
            # A test that needs one that fails says so: torch.distributed.tensor.debug, for
            # example, needs numpy, which torch does not.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        kept_signals: dict[int, Any] = {signal.SIGTERM: at_sigterm, signal.SIGHUP: at_sighup}
        server = _Server(channel, prepare(), kept_signals, users, adopts=adopts)
        # What is here now lives as long as each rank: without this, a rank's first full collection
        # walks through it, and copies the pages of a million objects (see `gc.freeze`). Garbage
        # too: freed, it would leave holes in pages, which ranks would write into and so copy, and
        # its finalizers are the pytest process's.
        gc.freeze()
        # Of nothing, which takes no time: it empties the interpreter's free lists, as each rank's
        # first full collection would.
        gc.collect()
        if collects:
            gc.enable()
        server.run()
    except BaseException as error:  # noqa: BLE001  # nothing may unwind into the copied session
        reason = str(error) if isinstance(error, FsdpCommError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            channel.send(ServerFailed(reason=reason))
        status = 1
    finally:
        if server is not None:
            server.kill_all()
        # Also where the pytest process was killed and could not.
        remove_directory(directory)
        if users is not None:
            users.leave()
        os._exit(status)


@dataclass(slots=True, kw_only=True)
class _RankSet:
    """The processes of one rank set."""

    slots: HeldSlots
    """Held here: freed when the last rank is reaped, and, should this process be killed, by the
    kernel, as the ranks die with it."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the ranks that are not reaped yet, by rank."""
    groups: tuple[int, ...] = ()
    """The process groups of all ranks, in which others may be left."""
    is_resting: bool = False
    """Whether the ranks are only kept, and give up slots that another process waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spare:
    """A process that was forked ahead, while a test ran, and waits to hear which rank it is.

    As this process does not change between two forks, it is what it would be if forked later.
    """

    pid: int
    channel: Channel[BecomeRank]


class _Server:
    def __init__(
        self,
        channel: _Channel,
        run_rank: RunRank,
        kept_signals: Mapping[int, Any],
        users: SharedDirectory | None,
        *,
        adopts: bool,
    ) -> None:
        self._pid = getpid()
        self._parent = os.getppid()
        self._channel = channel
        self._run_rank = run_rank
        self._kept_signals = kept_signals
        self._users = users
        self._adopts = adopts
        self._sets: dict[int, _RankSet] = {}
        self._unended: list[int] = []  # killed in vain, by process id
        self._spares: list[_Spare] = []
        self._wanted_spares = 0
        self._rank_count = 0
        self._collapsing: Iterator[None] | None = collapse_memory()
        self._wakeup, write_end = socket.socketpair()
        self._wakeup.settimeout(0.0)
        write_end.settimeout(0.0)
        self._write_end = write_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            waiting: list[Any] = [self._channel, self._wakeup]
            readable, _, _ = select.select(waiting, [], [], self._idle_after_s())
            if not readable:
                self._prepare()
            if self._wakeup in readable:
                self._wakeup.recv(4096)
                self._reap()
            if self._channel in readable:
                for request in self._channel.receive_available():
                    if self._channel.is_hung_up():
                        return  # before ranks start that nobody waits for
                    self._handle(request)
                if self._channel.is_closed:
                    return
            # After the requests: ranks that have just been resumed are no longer resting.
            wanted = [
                n for n, kept in self._sets.items() if kept.is_resting and kept.slots.are_wanted
            ]
            for number in wanted:
                self._kill(number, within_s=HURRIED_S)

    def _idle_after_s(self) -> float | None:
        """After how long without a request there is something else to do; None if never."""
        if len(self._spares) < self._wanted_spares or self._can_collapse():
            return 0.0
        may_end = any(kept.is_resting and kept.slots.holds_any for kept in self._sets.values())
        return _WANTED_POLL_S if may_end else None

    def _can_collapse(self) -> bool:
        return self._collapsing is not None and self._rank_count >= _COLLAPSES_AFTER_RANKS

    def _prepare(self) -> None:
        """Does a short piece of work for later rank sets, while nobody waits."""
        if len(self._spares) < self._wanted_spares:
            self._fork_spare()
        elif self._collapsing is not None and self._can_collapse():
            try:
                next(self._collapsing)
            except StopIteration:
                self._collapsing = None

    def kill_all(self) -> None:
        # Here, to be gone before this process.
        spares = {number: spare.pid for number, spare in enumerate(self._spares)}
        kill(spares.values())
        self._await_ends(spares, self._patience_s())
        self._spares.clear()
        for number in list(self._sets):
            self._kill(number, within_s=self._patience_s())

    def _patience_s(self) -> float:
        """How long to wait for ends once there is no pytest process, or it waits for this one."""
        return HURRIED_S if os.getppid() == self._parent else PATIENCE_S

    def _handle(self, request: ServerRequest) -> None:
        match request:
            case StartSet():
                self._start(request.number, request.spec)
                self._wanted_spares = request.spares
            case RestSet():
                if request.number in self._sets:
                    self._sets[request.number].is_resting = True
            case ResumeSet():
                kept = self._sets.get(request.number)
                if kept is not None:
                    kept.is_resting = False
                self._channel.send(SetResumed(number=request.number, is_alive=kept is not None))
            case EndSet():
                unended = self._kill(request.number, within_s=request.within_s)
                self._channel.send(SetEnded(number=request.number, unended=unended))

    def _start(self, number: int, spec: RankSetSpec) -> None:
        started = _RankSet(slots=HeldSlots(spec.slots))
        # Before any fork: a child closes its copies of all slots.
        self._sets[number] = started
        self._rank_count += len(spec.ranks)
        for rank in spec.ranks:
            started.pids[rank] = self._start_rank(spec, rank)
        started.groups = tuple(started.pids.values())
        self._channel.send(SetStarted(number=number, pids=dict(started.pids)))

    def _start_rank(self, spec: RankSetSpec, rank: int) -> int:
        while self._spares:
            spare = self._spares.pop(0)
            with contextlib.closing(spare.channel) as channel, contextlib.suppress(OSError):
                if not is_gone(spare.pid):
                    channel.send(BecomeRank(spec=spec, rank=rank))
                    return spare.pid
        return self._fork(partial(self._run_rank, spec, rank))

    def _fork_spare(self) -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(theirs, SPARE)

        def wait() -> NoReturn:
            ours.close()
            order = channel.receive()
            if order is None:
                os._exit(0)
            channel.close()
            self._run_rank(order.spec, order.rank)

        pid = self._fork(wait)
        theirs.close()
        self._spares.append(_Spare(pid=pid, channel=Channel(ours, SPARES_OWNER)))

    def _fork(self, run: Callable[[], NoReturn]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = fork_quietly()
        if pid == 0:
            self._run_forked(run)
        # Also done by the child itself; whichever comes first, a kill of the group finds it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid

    def _run_forked(self, run: Callable[[], NoReturn]) -> NoReturn:
        status = 1
        try:
            end_with_parent(self._pid)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, handler in self._kept_signals.items():
                signal.signal(number, handler or signal.SIG_DFL)
            # A descriptor of the pytest process's end would keep it from seeing the server's death.
            self._channel.close()
            self._wakeup.close()
            self._write_end.close()
            for spare in self._spares:
                spare.channel.close()
            for kept in self._sets.values():
                kept.slots.forget()
            if self._users is not None:
                self._users.forget()
            run()
        except BaseException:  # noqa: BLE001  # nothing may unwind into the copied pytest session
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for number, kept in self._sets.items():
            for rank, pid in list(kept.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del kept.pids[rank]
                    code = os.waitstatus_to_exitcode(status)
                    self._channel.send(RankExited(number=number, rank=rank, status=code))

    def _kill(self, number: int, *, within_s: float) -> dict[int, int]:
        """Kills what a rank set left, and frees its slots.

        Returns:
            Process ids of the ranks that are not gone in time.
        """
        ended = self._sets.pop(number, None)
        if ended is None:
            return {}
        # The ranks first, without their groups: some of what they started cleans up after them.
        kill(ended.pids.values())
        unended = self._await_ends(ended.pids, within_s)
        if unended or not self._adopts:
            # Of ranks that ended too: what a test started must not outlive it.
            kill_groups(ended.groups)
        running = [pid for other in self._sets.values() for pid in other.pids.values()]
        running += [spare.pid for spare in self._spares]
        self._unended += unended.values()
        # Each is waited for once.
        self._unended += kill_children([*running, *self._unended], within_s=self._patience_s())
        ended.slots.release()
        return unended

    def _await_ends(self, pids: Mapping[int, int], within_s: float) -> dict[int, int]:
        until = time.monotonic() + within_s
        while True:
            left = {rank: pid for rank, pid in pids.items() if not is_gone(pid)}
            now = time.monotonic()
            if not left or now > until:
                break
            if self._channel.is_hung_up():
                until = min(until, now + self._patience_s())
            if select.select([self._wakeup], [], [], _HUNG_UP_POLL_S)[0]:
                self._wakeup.recv(4096)
        # The signals of these may have been merged with those of others.
        self._reap()
        return left
