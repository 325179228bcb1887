"""Runs a session in processes that a launcher such as torchrun started, one per rank."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, OWN_RANK_VARIABLE, LaunchedRank
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.ranks.hangs.position import Watchdog
from pytest_fsdp_comm.ranks.rank.main import RankTemplate, save_coverage
from pytest_fsdp_comm.ranks.rank.process_group import connect_store
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly, run_exit_functions, run_finalizers
from pytest_fsdp_comm.ranks.session.runner import RankRunner
from pytest_fsdp_comm.ranks.start import ending
from pytest_fsdp_comm.ranks.start.fork_server import ServerDiedError
from pytest_fsdp_comm.ranks.start.spawn import arguments_of, find_reason_to_spawn
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel, keep_alive
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.text.rank_lists import name_ranks, prefix_texts_with_ranks

# How long to wait for all ranks to join. They import torch first, which can be slow if all hosts of
# a cluster read it from one file server at once.
_MEET_TIMEOUT_S: Final = 300.0
_ADDRESS: Final = "address"
"""Key in the launcher's store under which rank 0 publishes its port and a token for joining."""
_JOINS_WITHIN_S: Final = 10.0
_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.01
# Long enough to tear down the fixtures that a rank kept for the next test.
_ENDS_TESTS_WITHIN_S: Final = 30.0

# Note [Launched ranks]: every launched process collects the same tests and serves as one rank for
# the entire session. The exception is rank 0's process: it supervises all ranks and reports to the
# user, so it starts a child process that serves as rank 0. Each rank opens two connections to rank
# 0's process: one for its main thread and one for its watchdog. A rank that fails destroys its
# process group, so that its peers fail instead of waiting. If a rank hangs or dies, the session
# ends, because a launched process cannot be replaced.


def join_session(session: pytest.Session, launched: LaunchedRank) -> None:
    """On rank 0, start the runners of the session's tests; other ranks run tests and exit."""
    environment = pytest.MonkeyPatch()
    environment.setenv(INSIDE_VARIABLE, "1")
    # The process may run another session later, so restore its environment at the end of this one.
    session.config.add_cleanup(environment.undo)
    simulated, real = [], []
    for item in session.items:
        if (settings := item.stash.get(SETTINGS, None)) is None:
            continue
        if settings.backend == "fake":
            simulated.append(item)
        elif settings.world_size == launched.world_size:
            real.append(item)
        else:
            size = settings.world_size
            reason = f"needs {size} ranks, but {launched.launcher} started {launched.world_size}"
            item.add_marker(pytest.mark.skip(reason=reason))
    if not launched.is_leader:
        _serve_as_rank(session, launched)
    if simulated:
        forked = RankRunner(session, simulated)
        session.config.add_cleanup(forked.close)
        forked.start()  # before this process does anything that makes a fork unsafe
    ranks = LaunchedRanks(session, launched, own_rank=_start_own_rank(session, launched))
    runner = RankRunner(session, real, launched=ranks)
    session.config.add_cleanup(runner.close)
    _install_sigterm_handler(session)
    runner.start()
    ranks.meet()


def _start_own_rank(session: pytest.Session, launched: LaunchedRank) -> int:
    config = session.config
    if find_reason_to_spawn(config.stash[OPTIONS].start):
        arguments, environment = arguments_of(config)
        environment = {**environment, OWN_RANK_VARIABLE: "1"}
        environment.pop(INSIDE_VARIABLE)
        process = subprocess.Popen(  # noqa: S603  # pytest itself
            [sys.executable, "-m", "pytest", *arguments],
            stdin=subprocess.DEVNULL,
            cwd=config.invocation_params.dir,
            env=environment,
        )
        process.returncode = 0  # keeps Popen from warning; `_end_all_ranks` reaps the process
        return process.pid
    parent = os.getpid()
    pid = fork_quietly()
    if pid == 0:
        ending.end_with_parent(parent)
        _serve_as_rank(session, launched)
    return pid


def _install_sigterm_handler(session: pytest.Session) -> None:
    # When a process fails, the launcher sends SIGTERM to all the others. This process still has to
    # report the failure, so it must not exit yet. The launcher also ends the other ranks, so the
    # running test ends soon.
    def note(*_: object) -> None:
        session.shouldfail = session.shouldfail or (
            "the launcher ended this run (SIGTERM): one of its processes failed, or the launcher "
            "itself was stopped"
        )

    def restore() -> None:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    session.config.add_cleanup(restore)


def _describe_test(item: pytest.Item) -> str:
    settings = item.stash.get(SETTINGS, None)
    if settings is None:
        return item.nodeid
    device = f", device {settings.device}" if settings.device else ""
    ranks = f"{len(settings.ranks)} of " if len(settings.ranks) < settings.world_size else ""
    return (
        f"{item.nodeid} on {ranks}{settings.world_size} ranks ({settings.backend}, "
        f"scope {settings.scope}, timeout {settings.timeout_s:g} s{device})"
    )


# The functions below turn a launched process into a rank that takes commands from rank 0's process.


class _EndedError(Exception):
    """Raised if this process has to exit before the session has ended; the message says why."""


def _serve_as_rank(session: pytest.Session, launched: LaunchedRank) -> NoReturn:
    """Run this process as a rank until rank 0's process ends the session, then exit."""
    # Never return to pytest: only rank 0's process may write reports, caches and snapshots.
    name = f"rank {launched.rank} on {socket.gethostname()}"
    status = int(pytest.ExitCode.TESTS_FAILED)
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        stderr = os.dup(2)
    try:
        ending.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, rank 0 ends this process
        _obey_rank_zero(session, launched)
        status = 0
    except _EndedError as error:
        os.write(stderr, f"fsdp-comm: {name}: {error}\n".encode())
    except BaseException:  # noqa: BLE001  # only rank 0's pytest reports
        os.write(stderr, f"fsdp-comm: {name}:\n{traceback.format_exc()}".encode())
    finally:
        with contextlib.suppress(BaseException):
            save_coverage()
            ending.kill_children([], within_s=ending.HURRIED_S)  # processes that tests left running
        os._exit(status)


def _obey_rank_zero(session: pytest.Session, launched: LaunchedRank) -> None:
    channel, watchdog_channel = _join_rank_zero(session, launched)
    command: messages.RankCommand | None = channel.receive()
    if isinstance(command, messages.Welcome):
        items = session.items
        items[:] = [items[index] for index in command.order]
        if command.randomly_seed is not None:
            # pytest-randomly chose a different seed in each process, so use rank 0's.
            session.config.option.randomly_seed = command.randomly_seed
        template = RankTemplate(session)
        watchdog = Watchdog(watchdog_channel, ends_process=True)
        command, spec = channel.receive(), None
        while isinstance(command, messages.RankSetSpec):
            spec = command
            spec.directory.mkdir(parents=True, exist_ok=True)  # rank 0's machine already has it
            command = template.run_set(spec, launched.rank, channel, watchdog, launched)
        run_exit_functions()
        run_finalizers()
        if spec is not None:
            ending.remove_directory(spec.directory.parent)
    if not isinstance(command, messages.EndSession):
        raise _EndedError("rank 0's process died, or closed the connection to this rank")


def _join_rank_zero(
    session: pytest.Session, launched: LaunchedRank
) -> tuple[Channel[messages.RankCommand], Channel[Any]]:
    try:
        store = connect_store(launched, timeout_s=_MEET_TIMEOUT_S)
        port, token = json.loads(store.get(_ADDRESS))
        sockets = [
            socket.create_connection((launched.host, port), timeout=_MEET_TIMEOUT_S)
            for _ in range(2)
        ]
    except (OSError, RuntimeError) as error:
        raise _EndedError(
            f"cannot reach rank 0 at {launched.host}:{launched.port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).partition(chr(10))[0]}"
        ) from None
    for connected in sockets:
        connected.settimeout(None)
        keep_alive(connected)
    channel: Channel[messages.RankCommand] = Channel(Connection(sockets[0].detach()))
    watchdog: Channel[Any] = Channel(Connection(sockets[1].detach()))
    problem = ""
    if session.testsfailed:
        problem = (
            f"could not collect all tests ({session.testsfailed} errors); run `pytest "
            "--collect-only` there to see them"
        )
    host, tests = socket.gethostname(), tuple(map(_describe_test, session.items))
    joined = messages.Joined(
        token=token, rank=launched.rank, host=host, tests=tests, problem=problem
    )
    channel.send(joined)
    watchdog.send(messages.Joined(token=token, rank=launched.rank, host=host, tests=None))
    return channel, watchdog


class LaunchedRanks:
    """A `RankServer` for ranks that a launcher started; see Note [Launched ranks]."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank, own_rank: int) -> None:
        self._session = session
        self._launched = launched
        self.pids = {0: own_rank}  # only this rank is a child of this process
        self.has_died = False
        self._store: Any = None
        self._hosts: dict[int, str] = {}
        self._channels: dict[int, Channel[messages.RankMessage]] = {}
        self._connections: dict[int, tuple[Connection, Connection]] = {}
        self._exited: dict[int, int | str] = {}
        self._silence = Pipe()  # its end for `fileno` never becomes readable: poll

    def meet(self) -> None:
        """Wait until all ranks have joined; fail unless all collected the same tests."""
        launched, config = self._launched, self._session.config
        tests = [_describe_test(item) for item in self._session.items]
        from torch.distributed import DistError  # noqa: PLC0415  # only needed with a launcher

        try:
            serves = not launched.has_store
            self._store = connect_store(launched, timeout_s=_MEET_TIMEOUT_S, serves=serves)
        except DistError as error:
            raise pytest.UsageError(
                f"cannot {'serve' if serves else 'reach'} the store of the launched ranks at "
                f"{launched.host}:{launched.port} (MASTER_ADDR, MASTER_PORT): "
                f"{str(error).partition(chr(10))[0]}; check that the port is free, and the same "
                "for every rank. If there is no launcher, unset RANK and WORLD_SIZE"
            ) from None
        joined = self._accept_all_ranks()
        orders = {rank: find_test_indices(tests, join.tests or ()) for rank, join in joined.items()}
        problems = {
            rank: f"(on {join.host}) {join.problem or describe_difference(tests, join.tests or ())}"
            for rank, join in joined.items()
            if join.problem or orders[rank] is None
        }
        if problems:
            lines = "\n".join(prefix_texts_with_ranks(problems))
            raise pytest.UsageError(
                f"all launched ranks must collect the same tests (in any order):\n{lines}\n"
                "compare what `pytest --collect-only -q` prints on each"
            )
        has_seed = config.pluginmanager.has_plugin("randomly")
        seed = config.getoption("randomly_seed") if has_seed else None
        for rank, order in orders.items():
            with contextlib.suppress(OSError):  # the rank is gone, as the first test will report
                welcome = messages.Welcome(order=tuple(order or ()), randomly_seed=seed)
                self._channels[rank].send(welcome)
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            hosts = {rank: f"on {host}" for rank, host in self._hosts.items()}
            reporter.write_line(f"fsdp-comm: {'; '.join(prefix_texts_with_ranks(hosts))}")
            reporter.flush()

    def _accept_all_ranks(self) -> dict[int, messages.Joined]:
        launched = self._launched
        token = secrets.token_hex(16)
        # Keyed by rank, and by whether the connection belongs to the rank's watchdog.
        joined: dict[tuple[int, bool], tuple[Connection, messages.Joined]] = {}
        began_at = time.monotonic()
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as listener:
            listener.settimeout(_POLL_S)
            self._store.set(_ADDRESS, json.dumps([listener.getsockname()[1], token]))
            while missing := {
                rank
                for rank in range(launched.world_size)
                for end in (False, True)
                if (rank, end) not in joined
            }:
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                after_s = time.monotonic() - began_at
                if after_s > _MEET_TIMEOUT_S:
                    raise pytest.UsageError(
                        f"{name_ranks(sorted(missing))} of {launched.world_size} did not join "
                        f"within {_MEET_TIMEOUT_S:g} s. According to {launched.launcher}, this "
                        f"process is rank 0 of {launched.world_size}: check that every rank was "
                        "started with the same tests. If there is no launcher, unset RANK and "
                        "WORLD_SIZE"
                    )
                with contextlib.suppress(TimeoutError):
                    self._admit_or_close(listener.accept()[0], token, joined)
            # The launched processes may run another session, which must not join this one.
            self._store.delete_key(_ADDRESS)
        self._connections = {
            rank: (joined[rank, False][0], joined[rank, True][0])
            for rank in range(launched.world_size)
        }
        for rank, (connection, _) in self._connections.items():
            self._channels[rank] = Channel(connection)
        messages_by_rank = {rank: joined[rank, False][1] for rank in self._connections}
        self._hosts = {rank: join.host for rank, join in messages_by_rank.items()}
        return messages_by_rank

    def _admit_or_close(
        self,
        accepted: socket.socket,
        token: str,
        joined: dict[tuple[int, bool], tuple[Connection, messages.Joined]],
    ) -> None:
        keep_alive(accepted)
        connection = Connection(accepted.detach())
        first: messages.Message | None = None
        with contextlib.suppress(OSError, CodecError):
            channel: Channel[messages.Message] = Channel(
                connection, stalls_s=extend_under_load(_JOINS_WITHIN_S)
            )
            first = channel.receive(within_s=extend_under_load(_JOINS_WITHIN_S))
        if isinstance(first, messages.Joined) and hmac.compare_digest(first.token, token):
            joined[first.rank, first.tests is None] = connection, first
        else:
            connection.close()

    def start_ranks(
        self, spec: messages.RankSetSpec
    ) -> Mapping[int, tuple[Connection, Connection]]:
        if self.has_died:
            raise ServerDiedError
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # the rank is gone, as `exit_statuses` will report
                channel.send(spec)
        return self._connections

    def end_ranks(
        self, within_s: float, *, running: Collection[int] = (), unanswered: Collection[int] = ()
    ) -> dict[int, int]:
        """If a rank has not finished its test, end all ranks and the session; else do nothing."""
        lost = {*running}
        for rank in () if lost else unanswered:
            with contextlib.suppress(OSError, CodecError):
                while message := self._channels[rank].receive(
                    within_s=extend_under_load(_ENDS_TESTS_WITHIN_S)
                ):
                    if isinstance(message, messages.TestsEnded):
                        break
                else:
                    lost.add(rank)
        if not lost:
            return {}
        self._session.shouldfail = (
            f"{name_ranks(sorted(lost))} of {self._launched.world_size} did not finish the test, "
            "so no other distributed test can run"
        )
        return self._end_all_ranks(within_s, stuck=lost)

    def _end_all_ranks(self, within_s: float, *, stuck: Collection[int] = ()) -> dict[int, int]:
        self.has_died = True
        until = time.monotonic() + within_s
        able = [channel for rank, channel in self._channels.items() if rank not in stuck]
        for channel in able:
            with contextlib.suppress(OSError):
                channel.send(messages.EndSession())
        # Let the other processes exit first: if this one exits with a failure, the launcher kills
        # all processes that are still running.
        while not all(channel.is_hung_up() for channel in able) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        pids, self.pids = self.pids, {}
        ending.kill(pids.values() if 0 in stuck else ())
        for _ in range(2):
            ends = {rank: ending.await_end(pid, within_s=within_s) for rank, pid in pids.items()}
            pids = {rank: pid for rank, pid in pids.items() if ends[rank] is None}
            ending.kill(pids.values())
        for pair in self._connections.values():
            for connection in pair:
                connection.close()  # makes the watchdog of a stuck rank end the rank
        self._connections, self._channels = {}, {}
        return pids

    def exit_statuses(self) -> dict[int, int | str]:
        for rank, channel in self._channels.items():
            if rank not in self._exited and channel.is_hung_up():
                status = (
                    ending.await_end(self.pids[rank], within_s=extend_under_load(_POLL_S))
                    if rank in self.pids
                    else None
                )
                self._exited[rank] = (
                    f"was lost (host {self._hosts[rank]}): its process crashed or was killed, "
                    "perhaps because memory ran out, or its machine or network failed"
                    if status is None
                    else status
                )
        return self._exited

    def fileno(self) -> int:
        return self._silence[0].fileno()

    def close(self) -> None:
        self._end_all_ranks(extend_under_load(ending.PATIENCE_S / 2))


_MOST_LISTED = 4


def find_test_indices(leader: Sequence[str], follower: Sequence[str]) -> list[int] | None:
    """Return, for each of the leader's tests, its index in `follower`; None if the tests differ."""
    if Counter(leader) != Counter(follower):
        return None
    # With --keep-duplicates, a test can be listed several times, so collect all of its indices.
    indices: dict[str, deque[int]] = defaultdict(deque)
    for index, test in enumerate(follower):
        indices[test].append(index)
    return [indices[test].popleft() for test in leader]


def describe_difference(leader: Sequence[str], follower: Sequence[str]) -> str:
    """Describe how a rank's tests differ from the leader's; the text follows the rank's name."""
    missing, added = Counter(leader) - Counter(follower), Counter(follower) - Counter(leader)
    parts = []
    if missing:
        parts.append(
            f"did not collect {missing.total()} of rank 0's {len(leader)} tests:"
            f"{_format_first_tests([*missing.elements()])}"
        )
    if added:
        tests = _format_first_tests([*added.elements()])
        parts.append(f"collected {added.total()} that rank 0 did not:{tests}")
    return "\n  and ".join(parts)


def _format_first_tests(lines: list[str]) -> str:
    more = len(lines) - _MOST_LISTED
    listed = [*lines[:_MOST_LISTED], *([f"... and {more} more"] if more > 0 else [])]
    return "".join(f"\n    {line}" for line in listed)
