"""Runs one rank: executes pytest's protocol for each test, and answers the supervisor."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import random
import signal
import sys
from collections.abc import Sequence
from os import getpid
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from pytest_fsdp_comm.gathering import Exchange, TextStore
from pytest_fsdp_comm.launch_environment import (
    INSIDE_VARIABLE,
    RANK_VARIABLE,
    SPEC_VARIABLE,
    LaunchedRank,
)
from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.hangs.position import Watchdog, find_raise_site
from pytest_fsdp_comm.ranks.hangs.terminate import save_position_at_terminate
from pytest_fsdp_comm.ranks.rank import debugger, process_group, processes
from pytest_fsdp_comm.ranks.rank.context import EXTENSIONS, RANK_CONTEXT, RankContext
from pytest_fsdp_comm.ranks.rank.isolation import isolate_session, unregister_parents_plugins
from pytest_fsdp_comm.ranks.rank.kept_output import cut_middle
from pytest_fsdp_comm.ranks.rank.plugin import RankPlugin
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.results import SessionExit
from pytest_fsdp_comm.text.codec import dump_tagged, load_tagged

# The kernel copies each page of memory that a rank writes to, and changing a reference count is
# a write. So `RankTemplate` prepares the session once, before the fork; doing the same work in each
# rank took a third of a trivial test's time.


class RankTemplate:
    """The state that all ranks share, prepared in the process that they are forked from."""

    def __init__(self, session: pytest.Session, *, random_state: object = None) -> None:
        """Prepare the session; ranks set Python's `random` to `random_state`, unless it is None."""
        self._random_state = random_state
        self._session = session
        self._terminal = unregister_parents_plugins(session.config)
        for extension in session.config.stash[EXTENSIONS]:
            extension.enter_rank(session.config)
        has_state = random_state is not None
        self._plugin = RankPlugin(session.config, shares_random_states=has_state)
        session.config.pluginmanager.register(self._plugin, "fsdp-comm-rank")
        processes.forget_exit_functions()
        for item in session.items:
            if SETTINGS in item.stash:
                _ = item.location  # pytest caches it, so ranks do not compute it again
        # Without `freeze`, a rank's first garbage collection would visit a million objects and copy
        # their pages. Do not collect before `freeze`, because freeing garbage would run finalizers,
        # and leave holes in pages that ranks then write to.
        gc.freeze()
        gc.collect()  # empties the interpreter's free lists here instead of in each rank

    def run_rank(
        self, spec: messages.RankSetSpec, rank: int, descriptors: tuple[int, int]
    ) -> NoReturn:
        """Run tests as a rank until the supervisor closes the connection, then exit."""
        watchdog = Watchdog(Channel.inherit(descriptors[1]))
        # Launched ranks do without: their supervisor may run on another machine.
        save_position_at_terminate(spec.position_path(rank), watchdog.read_position)
        self.run_set(spec, rank, Channel.inherit(descriptors[0]), watchdog)
        os._exit(0)

    def run_set(
        self,
        spec: messages.RankSetSpec,
        rank: int,
        channel: Channel[messages.RankCommand],
        watchdog: Watchdog,
        launched: LaunchedRank | None = None,
    ) -> messages.RankCommand | None:
        """Run a rank set's tests; return the command that follows, or None if pytest hung up."""
        session = self._session
        processes.flush_streams()
        processes.redirect_output(spec, rank)
        # pytest made faulthandler dump to the terminal, where it would garble the progress line.
        faulthandler.enable(file=2)
        _install_stack_dumper(spec, rank)
        process_group.set_environment(spec, rank, launched)
        processes.put_sockets_below(spec.directory)
        basetemp = spec.basetemp / f"rank{rank}-{spec.directory.name}"
        isolate_session(session.config, basetemp=basetemp)
        if "terminal" in spec.echoes:
            self._terminal.open(spec.log_path(rank, "terminal"))
        if not spec.terminal:
            debugger.refuse_debuggers(session.config)
        elif rank == spec.debugged_rank:
            debugger.allow_debuggers(
                session.config, debugger.RankTerminal(spec.terminal, spec.foreground)
            )
        else:
            debugger.ignore_debuggers(session.config)
        if self._random_state is not None:
            # Python reseeds `random` in a forked child, so restore the parent's state.
            random.setstate(cast("tuple[Any, ...]", self._random_state))
        self._plugin.bind(channel, spec, rank)
        rank_pid = getpid()
        command: messages.RankCommand | None = messages.RunTest(
            item_index=spec.item_index, next_test=spec.next_test
        )
        number = 0
        # Open two clients of the store, because the process group may use its client in other
        # threads. Use them for all tests, because a new client reads the entire store file.
        clients = [process_group.open_store(spec, launched) for _ in range(2)]
        while isinstance(command, messages.RunTest):
            item, next_test = session.items[command.item_index], command.next_test
            nextitem = None if next_test.index is None else session.items[next_test.index]
            context = _make_rank_context(spec, rank, number, launched, clients)
            watchdog.begin_test()
            session.config.stash[RANK_CONTEXT] = context
            item.stash[SETTINGS] = spec.settings  # may include ranks that the marker does not list
            channel.send(messages.TestBegun())
            ended = _run_item(item, nextitem)
            # If this is a child that the test forked, a plugin may have caught the exception that
            # should have ended it, so end it here.
            processes.end_forked_child(rank_pid, None)
            if next_test.is_none:
                self._run_exit_functions(item)
            ended = dataclasses.replace(
                ended,
                further_ranks=self._plugin.further_ranks(),
                can_run_another=self._plugin.can_run_another_test(),
            )
            context.exchange.leave()
            if launched and (ended.payloads is None or self._plugin.has_failed):
                # Launched ranks are not killed after a failure, so this rank has to leave the
                # group; otherwise its peers would keep waiting for it.
                self._plugin.leave_group()
            command = _finish_test_and_await_command(channel, ended)
            number += 1
        if isinstance(command, messages.EndTests):
            self._plugin.end_tests(item)
            if launched:
                self._plugin.leave_group()
            else:
                self._run_exit_functions(item)
            # Report the end, then wait until the supervisor ends this process.
            command = _finish_test_and_await_command(channel, messages.TestsEnded())
        return command

    def _run_exit_functions(self, item: pytest.Item) -> None:
        """Run exit functions and finalizers, because ranks end with os._exit or are killed."""
        self._plugin.run_exit_functions(item)
        processes.run_finalizers()


def _finish_test_and_await_command(
    channel: Channel[messages.RankCommand], ended: messages.TestEnded | messages.TestsEnded
) -> messages.RankCommand | None:
    save_coverage()
    processes.flush_streams()
    channel.send(ended)
    return channel.receive()


def _make_rank_context(
    spec: messages.RankSetSpec,
    rank: int,
    number: int,
    launched: LaunchedRank | None,
    clients: Sequence[Any],
) -> RankContext:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # noqa: PLC0415  # documented; not in the pytest process

    settings, (texts, store) = spec.settings, clients
    local_rank = launched.local_rank if launched else rank
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        local_world_size=launched.local_world_size if launched else settings.world_size,
        settings=settings,
        device=process_group.device_of(settings, local_rank),
        exchange=Exchange(TextStore(PrefixStore(f"test{number}", texts)), rank, settings.ranks),
        store=store,
    )


def _run_item(item: pytest.Item, nextitem: pytest.Item | None) -> messages.TestEnded:
    # Do not ask extensions for payloads after an exception: the session can be in any state then.
    try:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    except pytest.exit.Exception as error:
        status = pytest.ExitCode.INTERRUPTED if error.returncode is None else error.returncode
        session_exit = SessionExit(status=int(status), reason=cut_middle(str(error.msg)))
        return messages.TestEnded(session_exit=session_exit)
    except KeyboardInterrupt as error:
        reason = f"interrupted at {find_raise_site(error) or 'an unknown line'}"
        session_exit = SessionExit(status=int(pytest.ExitCode.INTERRUPTED), reason=reason)
        return messages.TestEnded(session_exit=session_exit)
    except BaseException as error:  # noqa: BLE001  # from a plugin
        message = cut_middle(str(error))
        name = type(error).__name__
        return messages.TestEnded(escaped=f"{name}: {message}" if message else name)
    extensions = item.config.stash[EXTENSIONS]
    payloads = tuple(dump_tagged(extension.rank_payload(item)) for extension in extensions)
    return messages.TestEnded(payloads=payloads)


def save_coverage() -> None:
    """Save coverage's data, because a rank ends without running coverage's exit handler."""
    if (current := _get_parallel_coverage()) is not None:
        # Do not stop coverage: restarting it fails on modules of torch (coverage 7.17).
        current.save()


def silence_coverage() -> None:
    """Disable coverage's warnings about missing data, because only ranks run tested code."""
    if (current := _get_parallel_coverage()) is not None:
        name = "run:disable_warnings"
        unmeasured = ["no-data-collected", "module-not-imported"]
        current.set_option(name, [*current.get_option(name), *unmeasured])


def _get_parallel_coverage() -> Any:
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage else None
    # Without run:parallel, all processes would overwrite the same data file, so do nothing.
    return current if current is not None and current.get_option("run:parallel") else None


def _install_stack_dumper(spec: messages.RankSetSpec, rank: int) -> None:
    # The handler is C code with a separate stack, so it works even while other code holds the GIL.
    # It dumps only the thread that receives the signal, because dumping all threads while they run
    # has crashed (CPython 116008, 131580).
    stacks = spec.stacks_path(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=False)


def prepare_spawned_rank() -> None:
    """Let this spawned rank tell where it is, even while it imports a conftest.py."""
    rank = int(os.environ[RANK_VARIABLE].split()[0])
    _install_stack_dumper(_read_spec(), rank)


def select_own_test(config: pytest.Config) -> None:
    """Make this spawned rank collect only the test that it has to run."""
    config.args[:] = [str(config.rootpath / _read_spec().nodeid)]


def run_spawned_rank(session: pytest.Session) -> NoReturn:
    """Run this spawned process as a rank, once it has collected the tests."""
    spec = _read_spec()
    indices = [index for index, item in enumerate(session.items) if item.nodeid == spec.nodeid]
    if not indices:
        raise pytest.UsageError(
            f"{spec.nodeid} was not found when a spawned rank collected the tests again; tests "
            "whose names are random, or depend on the time or the process id, cannot run on "
            "spawned ranks"
        )
    rank, *descriptors = map(int, os.environ.pop(RANK_VARIABLE).split())
    # If a test starts pytest, the new process must not become a rank.
    del os.environ[SPEC_VARIABLE]
    os.environ[INSIDE_VARIABLE] = "1"
    template = RankTemplate(session)
    spec = dataclasses.replace(spec, item_index=indices[0])
    template.run_rank(spec, rank, (descriptors[0], descriptors[1]))


def _read_spec() -> messages.RankSetSpec:
    text = Path(os.environ[SPEC_VARIABLE]).read_text(encoding="utf-8")
    return load_tagged({"RankSetSpec": messages.RankSetSpec}, text)
