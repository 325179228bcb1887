"""Forked ranks and their fork server, seen from the pytest process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.channel import Channel
from pytest_fsdp_comm.ranks.server import fork_quietly, kill_groups, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_fsdp_comm.ranks.launch import Launch
    from pytest_fsdp_comm.ranks.server import RunRank


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
            kill_groups(self._pids.values())

    def _receive(self) -> dict[str, Any]:
        message = self._channel.receive()
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
