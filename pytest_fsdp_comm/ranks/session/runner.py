"""Runs distributed tests on behalf of the pytest process, one at a time."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.marker import add_ranks
from pytest_fsdp_comm.options import (
    MARKER_NAME,
    OPTIONS,
    PLUGIN_TIMEOUT_S,
    SETTINGS,
    BadValueError,
    DistributedSettings,
)
from pytest_fsdp_comm.ranks.rank.context import EXTENSIONS, RANK_CONTEXT
from pytest_fsdp_comm.ranks.rank.debugger import copy_terminal, keep_foreground
from pytest_fsdp_comm.ranks.rank.gpus import (
    blame_missing_gpu_in_errors,
    count_visible_gpus,
    visible_gpu_names,
)
from pytest_fsdp_comm.ranks.rank.isolation import live_log_handler, resolve_basetemp
from pytest_fsdp_comm.ranks.rank.main import RankTemplate, silence_coverage
from pytest_fsdp_comm.ranks.rank.process_group import count_gpus_of_ranks
from pytest_fsdp_comm.ranks.session.reruns import run_with_reruns
from pytest_fsdp_comm.ranks.session.supervision import Supervision
from pytest_fsdp_comm.ranks.session.verdict import merge_reports, merge_user_properties
from pytest_fsdp_comm.ranks.start.ending import HURRIED_S, PATIENCE_S, remove_directory
from pytest_fsdp_comm.ranks.start.fork_server import (
    FIXTURE_MODULES,
    RankServer,
    RunRank,
    ServerDiedError,
    fork_server,
)
from pytest_fsdp_comm.ranks.start.slots import Slots
from pytest_fsdp_comm.ranks.start.spawn import find_reason_to_spawn, spawn_server
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.messages import NextTest, RankSetSpec
from pytest_fsdp_comm.ranks.wire.results import RankResult, SessionExit, WarningSeen
from pytest_fsdp_comm.text.codec import load_tagged
from pytest_fsdp_comm.text.rank_lists import group_ranks_by_text, name_ranks

# Numbers that name the directories of rank sets; all runners of this process share the counter.
_SET_NUMBERS: Final = itertools.count(1)


class _NotStartedError(Exception):
    """Raised if ranks could not be started; the message says why."""


class RankRunner:
    """Starts and supervises ranks, and reports the tests that they run."""

    _slots: Slots

    def __init__(
        self,
        session: pytest.Session,
        items: Collection[pytest.Item],
        *,
        launched: RankServer | None = None,
    ) -> None:
        """Run `items` on the `launched` ranks, or, if None, on the ranks of a new server."""
        self._session = session
        self._items = {*items}
        self._launched = launched
        self._directory = _make_session_directory()
        # The directory of the slots that xdist workers share; None without xdist.
        self._shared_slots = _find_shared_slots_directory(session.config)
        self._indices = {item: index for index, item in enumerate(session.items)}
        self._server: RankServer | None = None
        self._terminal: tuple[int, ...] = ()
        self._supervision: Supervision | None = None
        self._random_state: object = None
        self._problems: list[str] = []
        self._unpreparable = ""
        # Why ranks are started as new processes; empty if they are forked or launched.
        self._fallback_reason = ""

    def start(self) -> None:
        """Fork the fork server, or start a process that spawns ranks if a fork is not safe."""
        self._terminal = copy_terminal(self._session.config)
        self._random_state = random.getstate()
        silence_coverage()
        self._start_server()
        self._session.config.pluginmanager.register(self)

    def _start_server(self) -> None:
        # Launched ranks need no slots: the launcher chose the number of ranks, and each rank uses
        # the GPU whose index is its local rank.
        is_bounded = self._launched is None
        options, gpus = self._session.config.stash[OPTIONS], self._list_gpus() if is_bounded else ()
        self._slots = Slots(
            self._shared_slots or self._directory / "slots",
            ranks=options.rank_slots if is_bounded else None,
            gpus=gpus,
        )
        self._fallback_reason = "" if self._launched else find_reason_to_spawn(options.start)
        if self._launched:
            self._server = self._launched
        elif self._fallback_reason:
            self._server = spawn_server(self._session.config, self._directory, self._terminal)
        else:
            fixtures = {name for item in self._items for name in getattr(item, "fixturenames", ())}
            self._server = fork_server(
                self._prepare_ranks,
                self._directory,
                [module for name, module in FIXTURE_MODULES.items() if name in fixtures],
                # Importing torch takes 2 s of CPU time, which is wasted if this xdist worker gets
                # no distributed test. But import it now if there are slots, because other workers
                # would have to wait for this worker's slots while it imports torch.
                is_lazy=self._shared_slots is not None and not (gpus or options.rank_slots),
            )
        if self._fallback_reason and options.start == "auto":
            _show_remark(
                self._session.config,
                f"fsdp-comm: {self._fallback_reason}, so forking is not safe. Ranks start as new "
                "pytest processes instead, which takes seconds per test. To fork ranks again, move "
                "the code that does this into a fixture (--comm-start=fork forks anyway)",
            )

    def _close_server(self) -> int | None:
        server, self._server = self._server, None
        try:
            return None if server is None else server.close()
        finally:
            remove_directory(self._directory)

    def _replace_server(self) -> str:
        """Replace a fork server that has died; return in words how the old server ended."""
        status = self._close_server()
        self._directory = _make_session_directory()
        self._start_server()
        if not status:  # the status is also 0 if a test has reaped the server
            return "has ended"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def _list_gpus(self) -> tuple[str, ...]:
        if not any(count_gpus_of_ranks(item.stash[SETTINGS]) for item in self._items):
            return ()  # counting GPUs would import torch in this process
        return visible_gpu_names(os.environ, count_visible_gpus())

    # This plugin is registered last, so this hook runs before those of other plugins.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run one test and log its reports; leave other tests, and tests in a rank, to pytest."""
        if item not in self._items or RANK_CONTEXT in item.config.stash:
            return None
        hook = item.ihook
        attempt = partial(self._run_and_merge_reports, item, nextitem)
        if not run_with_reruns(item, nextitem, attempt):
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in attempt():
                hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Tests without ranks may have set up fixtures of a wider scope in this process. Tear down
        # the fixtures that the next test does not use.
        item.session._setupstate.teardown_exact(nextitem)  # noqa: SLF001  # as pytest's runner
        return True

    def _run_and_merge_reports(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        results = self._run_until_ranks_suffice(item, nextitem)
        load = partial(item.config.hook.pytest_report_from_serializable, config=item.config)
        reports = merge_reports(item, results, load, limit=_time_limit_of(item)[1])
        _replay_warnings(item.config, results.values())
        exits = {rank: r.session_exit for rank, r in results.items() if r.session_exit}
        if exits:
            _exit_session(item, exits, reports)
            return reports
        self._merge_payloads_or_fail_test(item, results, reports)
        merge_user_properties(reports, results)
        return reports

    def close(self) -> None:
        was_interrupted = self._session.exitstatus == pytest.ExitCode.INTERRUPTED
        try:
            self._end_ranks(is_hurried=was_interrupted)
        finally:
            # xdist may interrupt a worker in `_end_ranks`, but the server must be closed anyway.
            self._close_server()
        # Problems are reported with the next test, but no test is left, so print them here.
        for problem in self._problems:
            text = printable(problem, "\n")
            sys.stderr.write(f"fsdp-comm: {text}\n")
        for descriptor in self._terminal:
            os.close(descriptor)
        self._terminal = ()

    def _prepare_ranks(self) -> RunRank:
        blame_missing_gpu_in_errors()
        return RankTemplate(self._session, random_state=self._random_state).run_rank

    def _choose_next_test(self, candidate: pytest.Item | None, item: pytest.Item) -> NextTest:
        """Return what the ranks of `item` do next if pytest's next test is `candidate`."""
        settings = item.stash[SETTINGS]
        if self._launched or (settings.scope == "module" and self._is_limited_by_slots(settings)):
            # Keep the ranks, but let them tear down all fixtures. Launched ranks run every test of
            # the session. Ranks with slots end earlier if another process needs the slots.
            return NextTest(is_none=False)
        if settings.scope == "test":
            return NextTest()
        items = self._session.items
        while candidate is not None and _get_module(candidate) is _get_module(item):
            index = self._indices[candidate]
            if SETTINGS in candidate.stash:
                suits = candidate.stash[SETTINGS] == settings
                return NextTest(index=index, is_none=False) if suits else NextTest()
            # The candidate runs without ranks, so look at the test after it.
            candidate = items[index + 1] if index + 1 < len(items) else None
        return NextTest()

    def _run_until_ranks_suffice(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> dict[int, RankResult]:
        results = self._run_once(item, nextitem)
        further = {rank for result in results.values() for rank in result.further_ranks}
        if further:
            settings, options = item.stash[SETTINGS], item.config.stash[OPTIONS]
            try:
                item.stash[SETTINGS] = add_ranks(settings, further, options)
            except BadValueError as problem:
                self._problems.append(f"@pytest.mark.{MARKER_NAME}: {problem}")
                return results
            self._end_ranks()
            results = self._run_once(item, nextitem)
        return results

    def _run_once(self, item: pytest.Item, nextitem: pytest.Item | None) -> dict[int, RankResult]:
        died: ServerDiedError | _NotStartedError | None = None
        began_at = time.time()
        try:
            try:
                ranks = self._reuse_or_start_ranks(item, nextitem)
                # Waiting for slots counts neither as start-up nor as test time.
                started_at = time.monotonic()
                try:
                    with keep_foreground(self._terminal):
                        results = ranks.run(
                            started_at=started_at,
                            timeout_s=_time_limit_of(item)[0],
                            progress_after_s=item.config.stash[OPTIONS].progress_s,
                            nodeid=item.nodeid,
                        )
                except KeyboardInterrupt:
                    ranks.show_interrupt(item.nodeid, time.monotonic() - started_at)
                    raise
            except (ServerDiedError, _NotStartedError) as error:
                died = error
            if died is not None:
                # `_clean_up_and_report_lost_ranks` forks a new server, so call it outside the
                # handler. Otherwise, each exception in that server's ranks would have this
                # exception as its context.
                results = self._clean_up_and_report_lost_ranks(item, died, began_at)
            supervision, settings = self._supervision, item.stash[SETTINGS]
            keeps = (
                settings.scope == "module"
                # A spawned rank cannot run another test, because it has collected only this one.
                and not self._fallback_reason
                and supervision is not None
                and supervision.is_reusable
                # Idle ranks keep their slots locked, so do not keep the ranks if another pytest
                # process is waiting for slots; see Note [Slots].
                and (
                    self._shared_slots is None
                    or not self._is_limited_by_slots(settings)
                    or (self._can_reuse(supervision, nextitem) and not self._slots.are_wanted())
                )
            )
        except BaseException:
            # Do not let ranks outlive their test. Hurry, because the user may have pressed Ctrl-C.
            self._end_ranks(is_hurried=True)
            raise
        if not keeps:
            self._end_ranks()
        return results

    def _can_reuse(self, supervision: Supervision, item: pytest.Item | None) -> bool:
        return (
            item is not None
            and supervision.spec.settings == item.stash.get(SETTINGS, None)
            and _get_module(self._session.items[supervision.spec.item_index]) is _get_module(item)
        )

    def _is_limited_by_slots(self, settings: DistributedSettings) -> bool:
        return (
            self._session.config.stash[OPTIONS].rank_slots is not None
            or count_gpus_of_ranks(settings) > 0
        )

    def _reuse_or_start_ranks(self, item: pytest.Item, nextitem: pytest.Item | None) -> Supervision:
        index = self._indices[item]
        supervision = self._supervision
        if self._unpreparable:
            raise ServerDiedError(self._unpreparable)
        if (
            supervision is not None
            and self._can_reuse(supervision, item)
            and supervision.can_run(index)
            and not supervision.server.has_died
        ):
            supervision.begin_next_test(index, self._choose_next_test(nextitem, item))
            return supervision
        # End ranks that an earlier test left running, because the new ranks may need their slots.
        self._end_ranks()
        if self._server is not None and self._server.has_died:
            if self._launched:
                raise _NotStartedError("a rank was lost in an earlier test")
            self._replace_server()
        try:
            self._supervision = self._start_ranks(item, nextitem)
        except OSError as error:
            # A server that failed to prepare ranks has removed the directory, which causes this
            # OSError. In that case, `exit_statuses` raises an error with the server's reason.
            if self._server is not None:
                self._server.exit_statuses()
            raise _NotStartedError(str(error)) from None
        return self._supervision

    def _clean_up_and_report_lost_ranks(
        self, item: pytest.Item, error: ServerDiedError | _NotStartedError, began_at: float
    ) -> dict[int, RankResult]:
        self._end_ranks()
        if isinstance(error, _NotStartedError):
            text = f"could not be started: {error}"
        elif reason := str(error):
            # Do not start another server: that would take seconds and fail for the same reason.
            self._unpreparable = reason
            text = f"could not be prepared: {reason}"
        else:
            how = self._replace_server()
            text = f"died with the fork server (the parent of all ranks), which {how}"
        lost = partial(RankResult, status=text, phase_began_at=began_at, ended_at=time.time())
        return {rank: lost(rank=rank) for rank in item.stash[SETTINGS].ranks}

    def _start_ranks(self, item: pytest.Item, nextitem: pytest.Item | None) -> Supervision:
        if self._server is None:
            raise RuntimeError("start() comes before run()")
        directory = self._directory / str(next(_SET_NUMBERS))
        directory.mkdir()
        config, settings = self._session.config, item.stash[SETTINGS]
        debugged = config.stash[OPTIONS].pdb_rank
        next_test = NextTest() if self._fallback_reason else self._choose_next_test(nextitem, item)
        with self._slots.wait_for_free_slots(
            ranks=len(settings.ranks), gpus=count_gpus_of_ranks(settings)
        ) as (slots, gpus):
            spec = RankSetSpec(
                item_index=self._indices[item],
                nodeid=item.nodeid,
                settings=settings,
                directory=directory,
                basetemp=resolve_basetemp(config),
                echoes=_list_echoed_streams(config),
                next_test=next_test,
                store_prefix=f"{directory.parent.name}/{directory.name}",
                terminal=self._terminal,
                foreground=os.getpgrp(),
                debugged_rank=settings.ranks[0] if debugged is None else debugged,
                slots=slots,
                gpus=gpus,
            )
            connections = self._server.start_ranks(spec)
        return Supervision(
            spec, self._server, connections, config, are_spawned=bool(self._fallback_reason)
        )

    def _end_ranks(self, *, is_hurried: bool = False) -> None:
        """End the rank set, if any. Unless hurried, the next test reports ranks that survive."""
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            problems, unended = supervision.end(
                HURRIED_S if is_hurried else extend_under_load(PATIENCE_S)
            )
            self._problems += problems if is_hurried else [*problems, *unended]

    def _merge_payloads_or_fail_test(
        self, item: pytest.Item, results: Mapping[int, RankResult], reports: list[pytest.TestReport]
    ) -> None:
        """Pass all ranks' payloads to the extensions; fail the test if they return problems."""
        # Here an xfail counts as a failure, because the test did not run to its end.
        has_failed = any(
            report.failed or (report.skipped and hasattr(report, "wasxfail")) for report in reports
        )
        problems, self._problems = self._problems, []
        has_passed = not problems and all(report.passed for report in reports)
        extensions = item.config.stash[EXTENSIONS]
        for index, extension in enumerate(extensions):
            types = {extension.payload_type.__name__: extension.payload_type}
            payloads = {
                rank: load_tagged(types, result.payloads[index])
                for rank, result in results.items()
                if result.payloads is not None
            }
            problems += extension.merge(
                item, payloads, has_failed=has_failed, has_passed=has_passed
            )
        if problems:
            text = "\n\n".join(problems)
            failed = next((report for report in reports if report.failed), None)
            if failed is not None:
                failed.sections.append(("Problems", text))
            else:
                blamed = next((report for report in reports if report.when == "call"), reports[0])
                blamed.outcome = "failed"
                blamed.longrepr = text


def _replay_warnings(config: pytest.Config, results: Iterable[RankResult]) -> None:
    """Report each warning to pytest once, even if several ranks raised it."""
    for warning in dict.fromkeys(warning for result in results for warning in result.warnings):
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": _rebuild_warning(warning),
                "when": "runtest",
                "nodeid": warning.nodeid,
                "location": warning.location,
            }
        )


def _rebuild_warning(warning: WarningSeen) -> warnings.WarningMessage:
    try:
        category = getattr(importlib.import_module(warning.category_module), warning.category_name)
    except (ImportError, AttributeError):
        category = UserWarning
    try:
        message = category(warning.text)
    except TypeError:
        message = warning.text
    return warnings.WarningMessage(
        message=message, category=category, filename=warning.filename, lineno=warning.lineno
    )


def _exit_session(
    item: pytest.Item, exits: Mapping[int, SessionExit], reports: Sequence[pytest.TestReport]
) -> None:
    """End the session because ranks asked for it; name them unless all gave the same reason."""
    reasons = group_ranks_by_text(
        {rank: session_exit.reason for rank, session_exit in exits.items()}
    )
    text = "; ".join(f"{name_ranks(ranks)}: {reason}" for ranks, reason in reasons)
    if len(reasons) == 1 and len(exits) == len(item.stash[SETTINGS].ranks):
        text = reasons[0][1]
    if hasattr(item.config, "workerinput"):
        # Do not exit from an xdist worker: xdist would report a crash, and ignore the exit status.
        item.session.shouldstop = text
        return
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    pytest.exit(text, returncode=next(iter(exits.values())).status)


def _make_session_directory() -> Path:
    """Create the directory in which each rank set gets a subdirectory."""
    return Path(tempfile.mkdtemp(prefix="fsdp-comm-"))


def _show_remark(config: pytest.Config, text: str) -> None:
    if hasattr(config, "workerinput"):  # under xdist, only warnings reach the terminal
        warning = warnings.WarningMessage(text, pytest.PytestWarning, __file__, 1)
        sent = {"warning_message": warning, "when": "collect", "nodeid": "", "location": None}
        config.hook.pytest_warning_recorded.call_historic(kwargs=sent)
    elif reporter := config.pluginmanager.get_plugin("terminalreporter"):
        reporter.write_line(text, yellow=True)


def _time_limit_of(item: pytest.Item) -> tuple[float, str]:
    """Return the test's time limit in seconds and in words."""
    ours, theirs = item.stash[SETTINGS].timeout_s, item.stash.get(PLUGIN_TIMEOUT_S, math.inf)
    return min(ours, theirs), f"{ours:g} s" if ours <= theirs else f"{theirs:g} s (pytest-timeout)"


def _get_module(item: pytest.Item) -> pytest.Module | None:
    return item.getparent(pytest.Module)


def _list_echoed_streams(config: pytest.Config) -> tuple[str, ...]:
    shows_terminal = live_log_handler(config) is not None or any(
        config.getoption(name, default=False) for name in ("setupshow", "setuponly", "setupplan")
    )
    return (
        *(("stdout", "stderr") if config.getoption("capture", "fd") == "no" else ()),
        *(("terminal",) if shows_terminal else ()),
    )


def _find_shared_slots_directory(config: pytest.Config) -> Path | None:
    run = getattr(config, "workerinput", {}).get("testrunuid")
    if run is None:
        return None
    directory = resolve_basetemp(config)
    if config.pluginmanager.has_plugin("tmpdir"):
        directory = directory.parent  # shared by all workers
    return directory / f"fsdp-comm-slots-{run}"
