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
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.channel import Channel
from pytest_fsdp_comm.ranks.launch import Launch
from pytest_fsdp_comm.ranks.slots import HeldSlots

if TYPE_CHECKING:
    from pathlib import Path

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

RunRank = Callable[[Launch, int], Any]


class ServerDiedError(Exception):
    """The fork server has died, and every rank with it."""

    def __init__(self, reason: str = "") -> None:
        """Makes the text for whoever cannot go on without.

        Args:
            reason: Why it ended itself, so that the next one would, too; empty if it was killed.
        """
        self.reason = reason
        super().__init__(
            f"ranks cannot be prepared: {reason}"
            if reason
            else "the process that ranks are forked from has died (out of memory?)"
        )


def fork_quietly() -> int:
    """`os.fork` without the warning that Python 3.12 gives wherever a thread lives.

    An xdist worker always has one, which never holds a lock that a rank needs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class ForkServer:
    """The pytest process's end."""

    def __init__(self, prepare: Callable[[], RunRank], directory: Path) -> None:
        """Forks the server.

        Args:
            prepare: Does in the server what every rank would do first, and returns what each does
                after its fork, from where it never returns.
            directory: Removed once the pytest process is gone.
        """
        ours, theirs = socket.socketpair()
        self._pid = fork_quietly()
        if self._pid == 0:
            ours.close()
            _serve(Channel(theirs), prepare, directory)
        theirs.close()
        self._channel = Channel(ours)
        self._launches = 0
        self._status: int | None = None
        self._is_reaped = False

    def launch(self, launch: Launch) -> ForkedRanks:
        """Forks one set of ranks.

        Raises:
            ServerDiedError: It is gone; so it is with whatever else is asked of the set.
        """
        self._launches += 1
        _ask(self._channel, {"launch": self._launches, "of": launch.dump()})
        return ForkedRanks(self._channel, self._launches, holds_slots=bool(launch.slots))

    @property
    def has_died(self) -> bool:
        """It ended on its own."""
        self._reap(os.WNOHANG)
        return self._is_reaped

    def close(self) -> int | None:
        """Ends the server and every rank.

        Returns:
            Its exit status, or minus the signal that ended it; None if somebody else took it.
        """
        self._channel.close()
        self._reap(0)
        return self._status

    def _reap(self, options: int) -> None:
        if self._is_reaped:
            return
        try:
            done, status = os.waitpid(self._pid, options)
        except ChildProcessError:
            self._is_reaped = True  # by a test that waits for any child
            return
        if done:
            self._is_reaped = True
            self._status = os.waitstatus_to_exitcode(status)


class ForkedRanks:
    """One set of forked ranks, seen from the pytest process."""

    def __init__(self, channel: Channel, number: int, *, holds_slots: bool) -> None:
        """Waits for the ranks' process ids."""
        self._holds_slots = holds_slots
        self._channel = channel
        self._number = number
        self._statuses: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._has_ended = False
        self._answers: list[bool] = []
        while not self._pids:
            self._take(self._receive())

    def fileno(self) -> int:
        """Readable when a rank ended."""
        return self._channel.fileno()

    def exit_statuses(self) -> dict[int, int]:
        """The ranks that ended, with exit status or minus signal number."""
        for message in self._channel.take_pending():
            self._take(message)
        while select.select([self._channel], [], [], 0)[0]:
            for message in self._channel.receive_available():
                self._take(message)
            if self._channel.is_closed:
                raise ServerDiedError
        return self._statuses

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank, if it still lives."""
        if rank not in self.exit_statuses():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def rest(self) -> None:
        """Says that the ranks run nothing: they are ended if another process wants their slots."""
        if self._holds_slots:
            with contextlib.suppress(ServerDiedError):  # `resume` will say so
                _ask(self._channel, {"rest": self._number})

    def resume(self) -> bool:
        """Says that the ranks are to run a test.

        Returns:
            Whether they still live.
        """
        try:
            if not self._holds_slots:
                # Nobody wanted any.
                self.exit_statuses()
                return True
            _ask(self._channel, {"resume": self._number})
            while not self._answers:
                self._take(self._receive())
        except ServerDiedError:
            return False
        return self._answers.pop()

    def end(self) -> None:
        """Kills what is left and waits until it is gone."""
        try:
            _ask(self._channel, {"end": self._number})
            while not self._has_ended:
                self._take(self._receive())
        except ServerDiedError:
            # Its ranks died with it (`worker._tie_to_parent`), but not what they had forked.
            _kill_groups(self._pids.values())

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._channel.receive()
        except ConnectionResetError:
            message = None
        if message is None:
            raise ServerDiedError
        return message

    def _take(self, message: dict[str, Any]) -> None:
        _raise_if_dead(message)
        if message["set"] != self._number:
            return
        if "pids" in message:
            self._pids = {int(rank): pid for rank, pid in message["pids"].items()}
        elif "exited" in message:
            self._statuses[message["exited"]] = message["status"]
        elif "resumed" in message:
            self._answers.append(message["resumed"])
        else:
            self._has_ended = True


def _kill_groups(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _ask(channel: Channel, message: dict[str, Any]) -> None:
    try:
        channel.send(message)
    except OSError:
        # Its last words may still be there.
        for last in channel.receive_available():
            _raise_if_dead(last)
        raise ServerDiedError from None


def _raise_if_dead(message: dict[str, Any]) -> None:
    if "died" in message:
        raise ServerDiedError(message["died"])


def _serve(channel: Channel, prepare: Callable[[], RunRank], directory: Path) -> NoReturn:
    """The server's life: forks and reaps until the pytest process is gone."""
    # Ctrl-C reaches the whole foreground group; the pytest process decides and then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A launcher ends the whole group with SIGTERM, and then, too, the pytest process decides.
    at_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
                self._kill(number)

    def kill_all(self) -> None:
        for number in list(self._groups):
            self._kill(number)

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
            self._kill(message["end"])
            self._channel.send({"set": message["end"]})

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

    def _kill(self, number: int) -> None:
        # The groups of ranks that ended too: what a test forked must not outlive it.
        _kill_groups(self._groups.pop(number, ()))
        for pid in self._sets.pop(number, {}).values():
            os.waitpid(pid, 0)
        self._resting.discard(number)
        if number in self._held:
            self._held.pop(number).release()
