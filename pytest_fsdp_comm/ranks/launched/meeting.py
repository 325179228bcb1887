"""What the processes of a launcher do alike: they talk through their store; see Note [Meeting]."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeVar

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.heartbeat import Heartbeat, Pulse
from pytest_fsdp_comm.ranks.rank.network import no_network_problem
from pytest_fsdp_comm.ranks.session.peers import Peers
from pytest_fsdp_comm.ranks.wire.exchange import forget
from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank, StoreAddress
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError, TextStore, connect_store
from pytest_fsdp_comm.text.codec import dump_tagged, load_tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    import pytest

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.launched.sigterm import Termination
    from pytest_fsdp_comm.ranks.wire.messages import StoreMessage

# Note [Meeting]: rank 0's process is the leader: it announces the next test, and gathers what the
# ranks did with it. The others follow. What each puts on the store, and where, test by test:
#
#     leader                                  follower R
#     plan            Plan                ->
#                                         <-  handshake/R         FollowerHandshake
#     test1/command   BeginTest           ->
#                                         <-  test1/result/R      FollowerResult
#     test1/verdict   Verdict             ->
#     ...
#     testN/command   EndSession          ->
#                                         <-  sign_off/R
#
# Whoever sees a rank of its own fail puts `test1/failed` there: the others have little time left.

# Note [Sessions of a launch]: a launcher may run several pytest sessions, one after another, whose
# processes share one store. Every process counts its own there, and all of a session's names are
# below its number: the first session of one process meets the first of the others. A store that
# rank 0 serves itself ends with its session, and the counts with it.

# Hosts of a cluster load torch from one busy file server at the same time.
MEET_TIMEOUT_S = 300.0
_ASK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02

PLAN = "plan"
# Present once a store that rank 0 serves is about to end.
_CLOSED = "closed"

_Message = TypeVar("_Message")


def read(text: str, *classes: type[_Message]) -> _Message:
    """A message of one of the classes from its text on the store."""
    return load_tagged({cls.__name__: cls for cls in classes}, text)


def fits(item: pytest.Item, launched: LaunchedRank) -> bool:
    """Whether a distributed test can run on the launched ranks."""
    settings = item.stash[SETTINGS]
    return settings.backend == "fake" or settings.world_size == launched.world_size


class Meeting(Peers):
    """A launched process among the others: what leader and followers do alike."""

    is_launched = True
    termination: Termination
    store: TextStore
    """This session's part of the launch's store; from `connect` on."""
    session_number: int
    """From 1, among the sessions of this process's rank; from `connect` on."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Store the arguments; `connect` and `begin_heartbeat` come before any test."""
        super().__init__(session)
        self.launched = launched
        self.began_at = 0.0
        """`time.time` at which the last test began here."""
        self.is_connected = False
        """Whether the process takes part: between `connect` and `close`."""
        self._test_count = 0
        self._set_number = 0
        self._number_in_set = 0
        self._asked_at: float | None = None
        self._has_failed = False
        self._heartbeat: Heartbeat | None = None
        self._pulses: dict[int, Pulse] = {}

    def connect(self) -> None:
        """Connect, and count the session; see Note [Sessions of a launch].

        Raises:
            StoreLostError: The store cannot be reached, or served, or ends.
        """
        launched = self.launched
        address = StoreAddress(
            host=launched.host, port=launched.port, prefix=f"pytest-fsdp-comm/{launched.run_id}"
        )
        if problem := no_network_problem():
            raise StoreLostError(problem)  # at once, not after a wait that no signal interrupts
        serves = launched.is_leader and not launched.has_store
        launch = TextStore(connect_store(address, timeout_s=MEET_TIMEOUT_S, serves=serves))
        if launch.has(_CLOSED):
            launch.close()
            raise StoreLostError("it belongs to the session before, which ends")
        self._launch, self.is_connected = launch, True
        self.session_number = launch.count(_sessions(launched.rank), add=1)
        self._address = address.below(f"session{self.session_number}")
        self.store = launch.below(f"session{self.session_number}")

    def sessions_of(self, rank: int) -> int:
        """How many sessions another process has begun."""
        return self._launch.count(_sessions(rank))

    def begin_heartbeat(self) -> None:
        """Start a thread, which lives until `close`; see Note [A thread that no fork meets]."""
        client = TextStore(connect_store(self._address, timeout_s=MEET_TIMEOUT_S))
        self._heartbeat = Heartbeat(client, self.launched.rank)

    def silence_s(self, rank: int) -> float:
        """How long another process has not given a sign of life, in seconds."""
        if rank not in self._pulses:
            self._pulses[rank] = Pulse(self.store, rank)
        return self._pulses[rank].silence_s()

    def name(self, what: str, ahead: int = 0) -> str:
        """A name on the store for the last test that began, or for one some tests ahead of it."""
        return f"test{self._test_count + ahead}/{what}"

    def send(self, name: str, message: StoreMessage) -> None:
        """Put a message on the store."""
        self.store.put(name, dump_tagged(message))

    def await_texts(
        self, names: Mapping[int, str], given_up: Callable[[Collection[int]], Collection[int]]
    ) -> Iterator[tuple[int, str]]:
        """Wait for a text of each rank at its name; yield ranks and texts as they come.

        Between two looks `given_up` gets the missing ranks; it returns those not to wait for, or
        raises. Their texts may still come while the loop waits for others.
        """
        missing = dict(names)
        pause_s = _FIRST_PAUSE_S
        while True:
            for rank, name in names.items():
                if rank in missing and self.store.has(name):
                    del missing[rank]
                    yield rank, self.store.get(name)
            if not missing or missing.keys() <= {*given_up(missing.keys())}:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def announce_close(self) -> None:
        """Turn away processes that come now, for the session after this one."""
        self._launch.put(_CLOSED, "")

    def can_run(self, item: pytest.Item) -> bool:
        """See `Peers`."""
        return fits(item, self.launched)

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """See `Peers`."""
        del index
        self._test_count += 1
        self._has_failed = False
        if reuses_ranks:
            self._number_in_set += 1
        else:
            self._set_number, self._number_in_set = self._test_count, 0
        self.began_at = time.time()
        return reuses_ranks

    def local_rank(self) -> LocalRank:
        """See `Peers`."""
        return LocalRank(
            rank=self.launched.rank,
            local_rank=self.launched.local_rank,
            local_world_size=self.launched.local_world_size,
            store=self._address.below(f"set{self._set_number}"),
        )

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`; a process that must end has no time for its rank either."""
        if self.termination.signalled_at is not None:
            has_failed = True
        if has_failed and not self._has_failed:
            self._has_failed = True
            self.store.put(self.name("failed"), "")
        now = time.monotonic()
        is_due = self._asked_at is None or now > self._asked_at + _ASK_EVERY_S
        if not self._has_failed and is_due:
            self._asked_at = now
            self._has_failed = self.store.has(self.name("failed"))
        return self._has_failed

    @contextlib.contextmanager
    def without_thread(self) -> Iterator[None]:
        """See Note [A thread that no fork meets]."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        yield
        self.begin_heartbeat()

    def forget_exchange(self) -> None:
        """Remove what this process's rank exchanged in the test, which may be large."""
        store = self.store.below(f"set{self._set_number}/test{self._number_in_set}")
        forget(store, self.launched.rank)

    def close(self) -> None:
        """See `Peers`."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        # They would keep alive the store that this process may serve.
        self._pulses.clear()
        if self.is_connected:
            self.is_connected = False
            self.store.close()
            self._launch.close()


def _sessions(rank: int) -> str:
    return f"sessions/{rank}"
