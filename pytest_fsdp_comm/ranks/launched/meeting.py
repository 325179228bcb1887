"""How launched processes talk through their store.

Rank 0's process is the leader: it announces the next test, and gathers what the ranks did with it.
Messages are those of `wire.messages`, under the names of `Names`.

A launcher may run several pytest sessions, one after another, whose processes share one store.
Every process counts its own there, and all of a session's names are below its number: the first
session of one process meets the first of the others. A store that rank 0 serves itself ends with
its session, and the counts with it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.heartbeat import Heartbeat
from pytest_fsdp_comm.ranks.rank.network import no_network_problem
from pytest_fsdp_comm.ranks.wire.exchange import StoreExchange
from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank, StoreAddress
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError, TextStore, connect_store
from pytest_fsdp_comm.text.codec import dump_tagged, load_tagged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.launched.sigterm import Termination
    from pytest_fsdp_comm.ranks.wire.messages import StoreMessage

# Hosts of a cluster load torch from one busy file server at the same time.
MEET_TIMEOUT_S = 300.0
_ASK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names on the store that belong to one test."""

    number: int
    """The test's, among those of the launched processes, from 1."""

    @property
    def command(self) -> str:
        """The leader's `LeaderCommand`."""
        return f"command/{self.number}"

    @property
    def failed(self) -> str:
        """Present once a rank has failed: the others have little time left."""
        return f"failed/{self.number}"

    def result(self, rank: int) -> str:
        """A rank's `FollowerResult`."""
        return f"result/{self.number}/{rank}"

    @property
    def verdict(self) -> str:
        """The leader's `Verdict`."""
        return f"verdict/{self.number}"


PLAN = "plan"
"""The name of the leader's `Plan`."""


def handshake(rank: int) -> str:
    """The name of a rank's `FollowerHandshake`."""
    return f"handshake/{rank}"


def sign_off(rank: int) -> str:
    """The name that is present once a rank's process will not read again."""
    return f"sign_off/{rank}"


_CLOSED = "closed"
"""The name that is present once a store that rank 0 serves is about to end."""


def _sessions(rank: int) -> str:
    return f"sessions/{rank}"


class Meeting:
    """A process's connection to the others, and what both kinds of process do with it."""

    def __init__(self, launched: LaunchedRank, termination: Termination) -> None:
        """Connects, and counts the session; `begin_heartbeat` comes before any test.

        Args:
            launched: This process's rank.
            termination: Notes the launcher's signal.

        Raises:
            StoreLostError: The store cannot be reached, or served, or ends.
        """
        self.launched = launched
        self.termination = termination
        self.test_count = 0
        """The tests that have begun, so also the number of the last one."""
        self._set_number = 0
        self._number_in_set = 0
        self._asked_at: float | None = None
        self._has_failed = False
        self._heartbeat: Heartbeat | None = None
        address = StoreAddress(
            host=launched.host, port=launched.port, prefix=f"pytest-fsdp-comm/{launched.run_id}"
        )
        if problem := no_network_problem():
            raise StoreLostError(problem)  # at once, not after a wait that no signal interrupts
        serves = launched.is_leader and not launched.has_store
        self._launch = TextStore(connect_store(address, timeout_s=MEET_TIMEOUT_S, serves=serves))
        if self._launch.has(_CLOSED):
            self._launch.close()
            raise StoreLostError("it belongs to the session before, which ends")
        self.session_number = self._launch.count(_sessions(launched.rank), add=1)
        """This session's, among those of this process's rank, from 1."""
        self._address = address.below(f"session{self.session_number}")
        self.store = self._launch.below(f"session{self.session_number}")
        """What this session's processes put there for each other."""

    @property
    def names(self) -> Names:
        """The names of the test that began last."""
        return Names(number=self.test_count)

    @property
    def names_before_last(self) -> Names:
        """The names of the test before the one that began last."""
        return Names(number=self.test_count - 1)

    @property
    def next_names(self) -> Names:
        """The names of the next test."""
        return Names(number=self.test_count + 1)

    def sessions_of(self, rank: int) -> int:
        """How many sessions another process has begun."""
        return self._launch.count(_sessions(rank))

    def begin_heartbeat(self) -> None:
        """Starts a thread, which lives until `close`."""
        # A client of its own: no two threads may use one.
        client = TextStore(connect_store(self._address, timeout_s=MEET_TIMEOUT_S))
        self._heartbeat = Heartbeat(client, self.launched.rank)

    @contextlib.contextmanager
    def without_thread(self) -> Iterator[None]:
        """Stops the heartbeat for as long as a fork takes."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        yield
        self.begin_heartbeat()

    def begin(self, *, reuses_ranks: bool) -> None:
        """Counts the next test.

        Args:
            reuses_ranks: Whether the ranks of the test before run it.
        """
        self.test_count += 1
        self._has_failed = False
        if reuses_ranks:
            self._number_in_set += 1
        else:
            self._set_number, self._number_in_set = self.test_count, 0

    def local_rank(self) -> LocalRank:
        """The rank to start here for the test that began last."""
        return LocalRank(
            rank=self.launched.rank,
            local_rank=self.launched.local_rank,
            local_world_size=self.launched.local_world_size,
            store=self._address.below(f"set{self._set_number}"),
        )

    def forget_exchange(self) -> None:
        """Removes what this process's rank exchanged in the test, which may be large."""
        store = self.store.below(f"set{self._set_number}/test{self._number_in_set}")
        StoreExchange(store, self.launched.rank, ()).forget()

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`; a process that is to end has no time for its rank either."""
        if self.termination.signalled_at is not None:
            has_failed = True
        if has_failed and not self._has_failed:
            self._has_failed = True
            self.store.put(self.names.failed, "")
        now = time.monotonic()
        is_due = self._asked_at is None or now > self._asked_at + _ASK_EVERY_S
        if not self._has_failed and is_due:
            self._asked_at = now
            self._has_failed = self.store.has(self.names.failed)
        return self._has_failed

    def send(self, name: str, message: StoreMessage) -> None:
        """Puts a message on the store."""
        self.store.put(name, dump_tagged(message))

    def receive(self, name: str, heard: Mapping[str, type[_Message]]) -> _Message:
        """Reads a message that is on the store.

        Args:
            name: Where it is.
            heard: The classes that it may be of, by name.
        """
        return load_tagged(heard, self.store.get(name))

    def announce_close(self) -> None:
        """Sends away who comes now, for the session after this one."""
        self._launch.put(_CLOSED, "")

    def close(self) -> None:
        """Ends the thread that uses the store, and leaves it."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.store.close()
        self._launch.close()


def fits(item: pytest.Item, launched: LaunchedRank) -> bool:
    """Whether a distributed test can run on the ranks that were launched."""
    settings = item.stash[SETTINGS]
    return settings.backend == "fake" or settings.world_size == launched.world_size


def polls() -> Iterator[None]:
    """Yields for ever, with a pause in between that grows to a limit."""
    pause_s = _FIRST_PAUSE_S
    for _ in itertools.count():
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
