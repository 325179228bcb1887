"""What the processes of one launch say to each other through their store, and how.

Rank 0's process is the leader: it says which test comes next, and gathers what the ranks did with
it. The names on the store are those of `Names`.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.heartbeat import Heartbeat
from pytest_fsdp_comm.ranks.wire.exchange import StoreExchange
from pytest_fsdp_comm.ranks.wire.launch import LaunchedPart, StoreAddress
from pytest_fsdp_comm.ranks.wire.text_store import TextStore, connect_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.launched.sigterm import Termination

# Hosts of a cluster load torch from one busy file server at the same time.
MEET_TIMEOUT_S = 300.0
_ASK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Names:
    """Names on the store that belong to one test, by its number."""

    number: int

    @property
    def command(self) -> str:
        """The leader says what comes next."""
        return f"command/{self.number}"

    @property
    def failed(self) -> str:
        """A rank has failed: the others have little time left."""
        return f"failed/{self.number}"

    def result(self, rank: int) -> str:
        """What a rank did."""
        return f"result/{self.number}/{rank}"

    @property
    def verdict(self) -> str:
        """The leader has every result."""
        return f"verdict/{self.number}"


PLAN = "plan"
"""The leader's tests."""


def hello(rank: int) -> str:
    """The name under which a process says that it has read the plan."""
    return f"hello/{rank}"


def farewell(rank: int) -> str:
    """The name under which a process says that it will not read again."""
    return f"farewell/{rank}"


class Meeting:
    """A process's connection to the others, and what both kinds of process do with it."""

    def __init__(self, launched: LaunchedRank, termination: Termination) -> None:
        """Connects.

        Raises:
            StoreLostError: The store cannot be reached, or served.
        """
        self.launched = launched
        self.termination = termination
        self.number = -1
        self._set_number = 0
        self._number_in_set = 0
        self._asked_at = 0.0
        self._has_said_failed = False
        self._address = StoreAddress(
            host=launched.host, port=launched.port, prefix=f"pytest-fsdp-comm/{launched.run_id}"
        )
        self.store = self._connect(serves=launched.is_leader and not launched.has_store)
        self._heartbeat = Heartbeat(self._connect(), launched.rank)

    @property
    def names(self) -> Names:
        """The names of the test that runs."""
        return Names(self.number)

    def begin(self, *, continues: bool) -> None:
        """Notes that the next test begins."""
        self.number += 1
        self._has_said_failed = False
        if continues:
            self._number_in_set += 1
        else:
            self._set_number, self._number_in_set = self.number, 0

    def part(self) -> LaunchedPart:
        """The rank to start here for the test that began."""
        return LaunchedPart(
            rank=self.launched.rank,
            local_rank=self.launched.local_rank,
            local_world_size=self.launched.local_world_size,
            store=self._address.below(f"set{self._set_number}"),
        )

    def forget_exchange(self) -> None:
        """Removes what this process's rank exchanged in the test, which may be much."""
        store = self.store.below(f"set{self._set_number}/test{self._number_in_set}")
        StoreExchange(store, self.launched.rank, ()).forget()

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`; a process that was told to end has no time for its rank either."""
        if self.termination.told_at is not None:
            has_failed = True
        if has_failed and not self._has_said_failed:
            self._has_said_failed = True
            self.store.put(self.names.failed, "")
        now = time.monotonic()
        if not self._has_said_failed and now > self._asked_at + _ASK_EVERY_S:
            self._asked_at = now
            self._has_said_failed = self.store.has(self.names.failed)
        return self._has_said_failed

    def close(self) -> None:
        """Ends the thread that uses the store."""
        self._heartbeat.close()

    def _connect(self, *, serves: bool = False) -> TextStore:
        timeout_s = MEET_TIMEOUT_S
        return TextStore(connect_store(self._address, timeout_s=timeout_s, serves=serves))


def fits(item: pytest.Item, launched: LaunchedRank) -> bool:
    """Whether a distributed test can run on the ranks that were launched."""
    settings = item.stash[SETTINGS]
    return settings.backend == "fake" or settings.world_size == launched.world_size


def polls() -> Iterator[None]:
    """Gives turns for ever, with a pause between them that grows to a limit."""
    pause_s = _FIRST_PAUSE_S
    for _ in itertools.count():
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
