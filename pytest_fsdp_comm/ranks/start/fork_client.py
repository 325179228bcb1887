"""Forked ranks and their fork server, seen from the pytest process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.start.ending import HURRIED_S, await_end, kill, kill_groups
from pytest_fsdp_comm.ranks.start.fork_server import fork_quietly, serve
from pytest_fsdp_comm.ranks.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_fsdp_comm.ranks.start.fork_server import RunRank
    from pytest_fsdp_comm.ranks.wire.launch import Launch

# The first answer comes after torch has been loaded, perhaps from a busy file server.
_PREPARED_WITHIN_S = 300.0
# Of a process that does nothing but answer.
_ANSWERED_WITHIN_S = 15.0
# It kills its ranks (`ending.HURRIED_S`) and removes a directory.
_CLOSED_WITHIN_S = 5.0


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
            serve(Channel(theirs), prepare, directory)
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
        return ForkedRanks(
            self._channel, self._launches, kill=self.kill, holds_slots=bool(launch.slots)
        )

    def kill(self) -> None:
        """Ends the server at once, and with it the ranks."""
        if not self.has_died:
            kill([self._pid])

    @property
    def has_died(self) -> bool:
        """It ended on its own."""
        self._reap(0.0)
        return self._is_reaped

    def close(self) -> int | None:
        """Ends the server and every rank.

        Returns:
            Its exit status, or minus the signal that ended it; None if somebody else took it.
        """
        self._channel.close()
        self._reap(_CLOSED_WITHIN_S)
        self.kill()
        self._reap(HURRIED_S)
        return self._status

    def _reap(self, within_s: float) -> None:
        if self._is_reaped:
            return
        try:
            self._status = await_end(self._pid, within_s=within_s)
        except ChildProcessError:
            self._is_reaped = True  # by a test that waits for any child
            return
        self._is_reaped = self._status is not None


class ForkedRanks:
    """One set of forked ranks, seen from the pytest process."""

    def __init__(
        self, channel: Channel, number: int, *, kill: Callable[[], None], holds_slots: bool
    ) -> None:
        """Waits for the ranks' process ids.

        Args:
            channel: To the fork server.
            number: Of the set, among those of the server.
            kill: Ends the server, which does not answer.
            holds_slots: Whether the server holds slots for the ranks.
        """
        self._kill_server = kill
        self._holds_slots = holds_slots
        self._channel = channel
        self._number = number
        self._statuses: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._alive: dict[int, int] | None = None
        self._answers: list[bool] = []
        until = time.monotonic() + _PREPARED_WITHIN_S
        while not self._pids:
            self._take(self._receive(until))

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
            until = time.monotonic() + _ANSWERED_WITHIN_S
            while not self._answers:
                self._take(self._receive(until))
        except ServerDiedError:
            return False
        return self._answers.pop()

    def end(self, within_s: float) -> dict[int, int]:
        """Kills what is left, and waits until it is gone, but not for longer."""
        until = time.monotonic() + within_s + _ANSWERED_WITHIN_S
        try:
            _ask(self._channel, {"end": self._number, "within_s": within_s})
            while self._alive is None:
                self._take(self._receive(until))
        except ServerDiedError:
            # Its ranks died with it (`worker._tie_to_parent`), but not what they had forked.
            kill_groups(self._pids.values())
        return self._alive or {}

    def _receive(self, until: float) -> dict[str, Any]:
        self._channel.settimeout(max(until - time.monotonic(), 0.001))
        try:
            message = self._channel.receive()
        except TimeoutError:
            self._kill_server()
            raise ServerDiedError from None
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
            self._alive = {int(rank): pid for rank, pid in message["alive"].items()}


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
