"""Runs distributed tests from the pytest process: one at a time, each with one verdict."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.ranks.rank.debugger import QUIT, point_to_debugger
from pytest_fsdp_comm.ranks.rank.gpus import visible_gpu_count, visible_gpu_names
from pytest_fsdp_comm.ranks.rank.isolation import resolve_basetemp
from pytest_fsdp_comm.ranks.rank.main import RankTemplate
from pytest_fsdp_comm.ranks.rank.process_group import gpus_of
from pytest_fsdp_comm.ranks.rank.terminal import copied_terminal, kept_foreground
from pytest_fsdp_comm.ranks.session.progress import tell_progress
from pytest_fsdp_comm.ranks.session.reruns import run_with_reruns
from pytest_fsdp_comm.ranks.session.supervision import Supervision
from pytest_fsdp_comm.ranks.session.verdict import merge_reports
from pytest_fsdp_comm.ranks.session.warnings import replay_warnings
from pytest_fsdp_comm.ranks.start.ending import HURRIED_S, PATIENCE_S
from pytest_fsdp_comm.ranks.start.fork_client import ForkServer, ServerDiedError
from pytest_fsdp_comm.ranks.start.fork_safety import unsafe_to_fork
from pytest_fsdp_comm.ranks.start.slots import Slots
from pytest_fsdp_comm.ranks.start.spawn import SpawnedRanks
from pytest_fsdp_comm.ranks.wire.launch import Launch, RankProcesses
from pytest_fsdp_comm.ranks.wire.results import RankResult
from pytest_fsdp_comm.ranks.wire.socket_paths import check_path, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_fsdp_comm.options import DistributedSettings
    from pytest_fsdp_comm.ranks.session.peers import Peers
    from pytest_fsdp_comm.ranks.start.fork_server import RunRank
    from pytest_fsdp_comm.ranks.wire.extension import Outcome, RankExtension


@dataclass(slots=True, kw_only=True)
class _Kept:
    """The ranks that run a test now, or are kept for the next one."""

    key: tuple[Any, ...]
    """What a test must share with those that the ranks ran."""
    nodeid: str
    """The first test that they ran."""
    supervision: Supervision
    processes: RankProcesses


class RankRunner:
    """Starts ranks, supervises them and reports for them; one in each pytest process."""

    def __init__(
        self,
        session: pytest.Session,
        extensions: Sequence[RankExtension],
        peers: Peers | None = None,
        *,
        slots_directory: str | None = None,
    ) -> None:
        """Prepares; starts nothing.

        Args:
            session: The session, after collection.
            extensions: What other rooms add to each test's way through the ranks.
            peers: The processes that have the other ranks; None if all ranks are started here.
            slots_directory: Through which the session's processes share ranks and GPUs; None if
                this is the only one.
        """
        self._session = session
        self._extensions = extensions
        self._peers = peers
        self._server: ForkServer | None = None
        self._directory: Path | None = None
        self._sets = 0
        self._places = {item: place for place, item in enumerate(session.items)}
        self._kept: _Kept | None = None
        self._terminal: tuple[int, ...] = ()
        self._was_quit = False
        self._problems: list[str] = []
        self._unpreparable = ""
        self._slots_directory = slots_directory
        self.fallback_reason = ""
        """Why ranks are started as new processes instead of forked; empty if they are forked."""

    def start(self) -> None:
        """Forks the fork server, unless the process is unsafe to fork."""
        self._terminal = copied_terminal(self._session.config)
        self._start_server()

    def _start_server(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp-comm-"))
        try:
            check_path(self._directory / "1000000" / "socket")
        except FsdpCommError as error:
            self._unpreparable = str(error)
        # What a launcher started is its own bound, and has its GPUs by the local rank.
        is_bounded = self._peers is None
        self._slots = Slots(
            Path(self._slots_directory or self._directory / "slots"),
            ranks=self._session.config.stash[OPTIONS].rank_slots if is_bounded else None,
            gpus=self._gpus() if is_bounded else (),
        )
        self.fallback_reason = unsafe_to_fork()
        if not self.fallback_reason:
            self._server = ForkServer(self._prepare_ranks, self._directory)

    def _replace_server(self) -> str:
        """Starts a fork server for one that has died.

        Returns:
            How that ended, to be read after "the process".
        """
        status = self._server.close() if self._server is not None else None
        self._server = None
        self._remove_directory()
        self._start_server()
        self.explain_fallback()
        if status is None:
            return "has ended"
        if status < 0:
            hint = " (out of memory?)" if -status == signal.SIGKILL else ""
            return f"was killed by signal {-status}{hint}"
        return f"ended with exit status {status}"

    def takes(self, item: pytest.Item) -> bool:
        """Whether the ranks that there are can run a distributed test; if not, it is skipped."""
        return self._peers is None or self._peers.takes(item)

    def _gpus(self) -> tuple[str, ...]:
        settings = (item.stash.get(SETTINGS, None) for item in self._session.items)
        if not any(found is not None and gpus_of(found) for found in settings):
            # Not asked for nothing: counting them imports torch here.
            return ()
        return visible_gpu_names(os.environ, visible_gpu_count())

    def explain_fallback(self) -> None:
        """Says on the terminal why ranks are slow to start, if they are."""
        reporter = self._session.config.pluginmanager.get_plugin("terminalreporter")
        if self.fallback_reason and reporter is not None:
            reporter.write_line(
                f"fsdp-comm: {self.fallback_reason}, which a fork does not survive; ranks are "
                "started as new pytest processes, which takes seconds for each test. Do it in a "
                "fixture instead to have them forked",
                yellow=True,
            )

    def run(
        self, item: pytest.Item, nextitem: pytest.Item | None, settings: DistributedSettings
    ) -> None:
        """Runs one test and logs its reports, as `pytest_runtest_protocol` has to."""
        hook = item.ihook
        attempt = partial(self._attempt, item, settings)
        if not run_with_reruns(item, nextitem, attempt):
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in attempt():
                hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Fixtures of wider scope that tests without ranks set up here end as without this plugin.
        item.session._setupstate.teardown_exact(nextitem)  # noqa: SLF001  # as pytest's runner
        if self._was_quit:
            pytest.exit(QUIT.removeprefix("Exit: "))

    def _attempt(self, item: pytest.Item, settings: DistributedSettings) -> list[pytest.TestReport]:
        try:
            results = self._run_ranks(item, settings)
        except ServerDiedError as error:
            # The other launched processes notice that this one is silent.
            pytest.exit(str(error), returncode=pytest.ExitCode.INTERNAL_ERROR)
        self._was_quit = any(result.escaped == QUIT for result in results.values())
        if self._was_quit:
            # Not a failure of the test, which just ends here.
            results = {rank: replace(result, escaped=None) for rank, result in results.items()}
        reports = merge_reports(item, results, self._load, timeout_s=settings.timeout_s)
        replay_warnings(item.config, results.values())
        reports = self._extended(item, results, reports)
        if item.config.getoption("usepdb", default=False):
            point_to_debugger(reports, results, _debugged_rank(item.config, settings))
        return reports

    def close(self) -> None:
        """Ends every process and removes what they shared."""
        self._end_kept(HURRIED_S)
        self._tell_problems()
        if self._server is not None:
            self._server.close()
            self._server = None
        for descriptor in self._terminal:
            os.close(descriptor)
        self._terminal = ()
        self._remove_directory()
        if self._peers is not None:
            self._peers.close()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def run_part(self, item: pytest.Item, settings: DistributedSettings) -> None:
        """Runs this process's ranks of a test that another process reports."""
        self._run_ranks(item, settings)
        self._tell_problems()

    def _tell_problems(self) -> None:
        """Tells of processes that are left where no test's report can."""
        problems, self._problems = self._problems, []
        for problem in problems:
            sys.stderr.write(f"fsdp-comm: {problem}\n")

    def _prepare_ranks(self) -> RunRank:
        return RankTemplate(self._session, self._extensions).become_rank

    def _run_ranks(self, item: pytest.Item, settings: DistributedSettings) -> dict[int, RankResult]:
        peers = self._peers if settings.backend != "fake" else None
        keeps = False
        try:
            try:
                run = self._begin(item, settings, peers)
                with kept_foreground(self._terminal):
                    # From here on: waiting for slots was not the test's fault.
                    results = run(
                        started_at=time.monotonic(), tell_progress=partial(tell_progress, item)
                    )
            except ServerDiedError as error:
                if peers is not None:
                    raise
                results = self._lose_server(settings, error)
            keeps = (
                settings.scope == "module"
                and self._server is not None
                and self._kept is not None
                and self._kept.supervision.is_reusable
            )
            if peers is not None:
                # The ranks live on meanwhile: a rank that ends breaks those that still run.
                results, keeps = peers.share(results, keeps=keeps)
        except BaseException:
            # Ctrl-C, say: no rank may outlive its test, and somebody waits.
            self._end_kept(HURRIED_S)
            raise
        if keeps and self._kept is not None:
            self._kept.processes.rest()
        else:
            self._end_kept(PATIENCE_S)
        return results

    def _begin(
        self, item: pytest.Item, settings: DistributedSettings, peers: Peers | None
    ) -> Callable[..., dict[int, RankResult]]:
        """Gives a test to the ranks that are kept for it, or starts new ones."""
        if self._unpreparable:
            raise ServerDiedError(self._unpreparable)
        key = (item.getparent(pytest.Module), settings)
        index = self._places[item]
        kept = self._kept
        continues = kept is not None and kept.key == key
        if peers is not None:
            continues = peers.begin(index, continues=continues)
        if kept is not None and continues and kept.processes.resume():
            run = partial(kept.supervision.run_next, index)
        else:
            # Before waiting for slots: kept ranks hold some.
            self._end_kept(PATIENCE_S)
            if peers is None and self._server is not None and self._server.has_died:
                self._replace_server()
            self._kept = self._start_set(item, index, settings, peers)
            run = partial(self._kept.supervision.run)
        if peers is not None:
            run = partial(run, has_failed_elsewhere=peers.has_failed_elsewhere)
        return run

    def _lose_server(
        self, settings: DistributedSettings, error: ServerDiedError
    ) -> dict[int, RankResult]:
        self._end_kept(PATIENCE_S)
        if error.reason:
            # So it would be with the next one, whose start takes seconds.
            self._unpreparable = error.reason
            text = f"could not be prepared: {error.reason}"
        else:
            how = self._replace_server()
            text = f"died with the process that all ranks are forked from, which {how}"
        return {rank: RankResult.of_lost(rank, text) for rank in settings.ranks}

    def _start_set(
        self,
        item: pytest.Item,
        index: int,
        settings: DistributedSettings,
        peers: Peers | None,
    ) -> _Kept:
        if self._directory is None:
            raise RuntimeError("start() comes before run()")
        self._sets += 1
        directory = self._directory / str(self._sets)
        directory.mkdir()
        config = self._session.config
        self._set_directory = directory
        part = peers.part() if peers else None
        with self._slots.turn(ranks=len(settings.ranks), gpus=gpus_of(settings)) as grant:
            launch = Launch(
                item_index=index,
                nodeid=item.nodeid,
                settings=settings,
                directory=directory,
                basetemp=peers.basetemp() if peers else resolve_basetemp(config),
                echoes=_echoes(config),
                part=part,
                terminal=self._terminal,
                debugged_rank=_debugged_rank(config, settings),
                slots=grant.files,
                gpus=grant.gpus,
            )
            listener = listen(launch.socket_path, 2 * len(launch.ranks))  # each has a watchdog
            processes = (
                self._server.launch(launch) if self._server else SpawnedRanks(config, launch)
            )
        return _Kept(
            key=(item.getparent(pytest.Module), settings),
            nodeid=item.nodeid,
            supervision=Supervision(launch, listener, processes),
            processes=processes,
        )

    def _end_kept(self, within_s: float) -> None:
        if self._kept is not None:
            supervision, nodeid = self._kept.supervision, self._kept.nodeid
            self._kept = None
            for rank, pid in supervision.end(within_s).items():
                self._problems.append(
                    f"rank {rank} of {nodeid} could not be ended: its process {pid} is still there "
                    f"{within_s:g} s after SIGKILL.\n"
                    "Does a driver or a file server not answer? What it waits for is in "
                    f"/proc/{pid}/stack (as root). Later tests have new ranks."
                )
            shutil.rmtree(self._set_directory, ignore_errors=True)

    def _load(self, data: dict[str, Any]) -> pytest.TestReport:
        config = self._session.config
        report: pytest.TestReport = config.hook.pytest_report_from_serializable(
            config=config, data=data
        )
        return report

    def _extended(
        self,
        item: pytest.Item,
        results: Mapping[int, RankResult],
        reports: list[pytest.TestReport],
    ) -> list[pytest.TestReport]:
        """Gives the extensions what their ranks sent; their problems fail the test."""
        outcome = _outcome(reports)
        problems, self._problems = self._problems, []
        for place, extension in enumerate(self._extensions):
            payloads = {
                rank: result.payloads[place]
                for rank, result in results.items()
                if result.payloads is not None
            }
            problems += extension.merge(item, payloads, outcome)
        if problems:
            text = "\n\n".join(problems)
            failed = next((report for report in reports if report.failed), None)
            if failed is not None:
                failed.sections.append(("Problems", text))
            else:
                blamed = next((report for report in reports if report.when == "call"), reports[0])
                blamed.outcome = "failed"
                blamed.longrepr = text
        return reports


def _debugged_rank(config: pytest.Config, settings: DistributedSettings) -> int:
    chosen = config.stash[OPTIONS].pdb_rank
    return settings.ranks[0] if chosen is None else chosen


def _echoes(config: pytest.Config) -> tuple[str, ...]:
    shows_setup = any(
        config.getoption(name, default=False) for name in ("setupshow", "setuponly", "setupplan")
    )
    return (
        *(("stdout", "stderr") if config.getoption("capture", "fd") == "no" else ()),
        *(("terminal",) if shows_setup else ()),
    )


def _outcome(reports: Sequence[pytest.TestReport]) -> Outcome:
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped for report in reports) else "passed"
