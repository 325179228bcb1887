"""Runs distributed tests from the pytest process: one at a time, each with one verdict."""

from __future__ import annotations

import importlib
import shutil
import socket
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.ranks.launch import Launch
from pytest_fsdp_comm.ranks.rank_pytest import resolve_basetemp
from pytest_fsdp_comm.ranks.safety import unsafe_to_fork
from pytest_fsdp_comm.ranks.server import ForkServer
from pytest_fsdp_comm.ranks.spawn import SpawnedRanks
from pytest_fsdp_comm.ranks.supervisor import Supervision
from pytest_fsdp_comm.ranks.verdict import merge_reports
from pytest_fsdp_comm.ranks.worker import run_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_fsdp_comm.options import DistributedSettings
    from pytest_fsdp_comm.ranks.extension import Outcome, RankExtension
    from pytest_fsdp_comm.ranks.peers import Peers
    from pytest_fsdp_comm.ranks.results import RankResult


class RankRunner:
    """Starts ranks, supervises them and reports for them; one in each pytest process."""

    def __init__(
        self,
        session: pytest.Session,
        extensions: Sequence[RankExtension],
        peers: Peers | None = None,
    ) -> None:
        """Prepares; starts nothing.

        Args:
            session: The session, after collection.
            extensions: What other rooms add to each test's way through the ranks.
            peers: The processes that have the other ranks; None if all ranks are started here.
        """
        self._session = session
        self._extensions = extensions
        self._peers = peers
        self._server: ForkServer | None = None
        self._directory: Path | None = None
        self._sets = 0
        self._places = {item: place for place, item in enumerate(session.items)}
        self._kept: tuple[tuple[Any, ...], Supervision, int] | None = None
        self.fallback_reason = ""
        """Why ranks are started as new processes instead of forked; empty if they are forked."""

    def start(self) -> None:
        """Forks the fork server, unless the process is unsafe to fork."""
        # Short, since a socket's path has at most 108 characters (104 on macOS).
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp-comm-"))
        self.fallback_reason = unsafe_to_fork()
        if not self.fallback_reason:
            self._server = ForkServer(self._run_rank)

    def takes(self, item: pytest.Item) -> bool:
        """Whether the ranks that there are can run a distributed test; if not, it is skipped."""
        return self._peers is None or self._peers.takes(item)

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
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        results = self._run_ranks(item, settings)
        reports = merge_reports(item, results, self._load, timeout_s=settings.timeout_s)
        for report in self._extended(item, results, reports):
            hook.pytest_runtest_logreport(report=report)
        self._replay_warnings(results)
        # Fixtures of wider scope that tests without ranks set up here end as without this plugin.
        item.session._setupstate.teardown_exact(nextitem)  # noqa: SLF001  # as pytest's runner
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def close(self) -> None:
        """Ends every process and removes what they shared."""
        self._end_kept()
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        if self._peers is not None:
            self._peers.close()

    def run_part(self, item: pytest.Item, settings: DistributedSettings) -> None:
        """Runs this process's ranks of a test that another process reports."""
        self._run_ranks(item, settings)

    def _run_rank(self, launch: Launch, rank: int) -> Any:
        run_rank(self._session, self._extensions, launch, rank)

    def _run_ranks(self, item: pytest.Item, settings: DistributedSettings) -> dict[int, RankResult]:
        peers = self._peers if settings.backend != "fake" else None
        key = (item.getparent(pytest.Module), settings)
        index = self._places[item]
        continues = self._kept is not None and self._kept[0] == key
        if peers is not None:
            continues = peers.begin(index, continues=continues)
        started_at = time.monotonic()
        if self._kept is not None and continues:
            _, supervision, number = self._kept
            self._kept = (key, supervision, number + 1)
            self._make_test_directory(number + 1)
            run = partial(supervision.run_next, index)
        else:
            self._end_kept()
            supervision = self._start_set(item, index, settings, peers)
            self._kept = (key, supervision, 0)
            run = partial(supervision.run)
        keeps = False
        try:
            if peers is None:
                results = run(started_at=started_at)
            else:
                results = run(
                    started_at=started_at, has_failed_elsewhere=peers.has_failed_elsewhere
                )
            keeps = (
                settings.scope == "module" and supervision.is_reusable and self._server is not None
            )
            if peers is not None:
                # The ranks live on meanwhile: a rank that ends breaks those that still run.
                results, keeps = peers.share(results, keeps=keeps)
        finally:
            # Also on Ctrl-C: no rank may outlive its test.
            if not keeps:
                self._end_kept()
        return results

    def _start_set(
        self,
        item: pytest.Item,
        index: int,
        settings: DistributedSettings,
        peers: Peers | None,
    ) -> Supervision:
        if self._directory is None:
            raise RuntimeError("start() comes before run()")
        self._sets += 1
        directory = self._directory / str(self._sets)
        directory.mkdir()
        config = self._session.config
        launch = Launch(
            item_index=index,
            nodeid=item.nodeid,
            settings=settings,
            directory=directory,
            basetemp=peers.basetemp() if peers else resolve_basetemp(config),
            echoes=_echoes(config),
            part=peers.part() if peers else None,
        )
        self._set_directory = directory
        self._make_test_directory(0)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(launch.socket_path))
        listener.listen(2 * len(launch.ranks))  # each has a watchdog
        processes = self._server.launch(launch) if self._server else SpawnedRanks(config, launch)
        return Supervision(launch, listener, processes)

    def _make_test_directory(self, number: int) -> None:
        (self._set_directory / f"test{number}").mkdir()

    def _end_kept(self) -> None:
        if self._kept is not None:
            _, supervision, _ = self._kept
            self._kept = None
            supervision.end()
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
        problems: list[str] = []
        for place, extension in enumerate(self._extensions):
            payloads = {
                rank: result.payloads[place]
                for rank, result in results.items()
                if result.payloads is not None
            }
            problems += extension.merge(item, payloads, outcome)
        if problems and outcome != "failed":
            blamed = next((report for report in reports if report.when == "call"), reports[0])
            blamed.outcome = "failed"
            blamed.longrepr = "\n\n".join(problems)
        return reports

    def _replay_warnings(self, results: Mapping[int, RankResult]) -> None:
        """Records each warning once, however many ranks gave it."""
        seen = set()
        for result in results.values():
            for warning in result.warnings:
                key = (warning["text"], warning["filename"], warning["lineno"], warning["when"])
                if key in seen:
                    continue
                seen.add(key)
                self._session.config.hook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": _rebuilt(warning),
                        "when": warning["when"],
                        "nodeid": warning["nodeid"],
                        "location": warning["location"] and tuple(warning["location"]),
                    }
                )


def _echoes(config: pytest.Config) -> tuple[str, ...]:
    shows_setup = any(
        config.getoption(name, default=False) for name in ("setupshow", "setuponly", "setupplan")
    )
    return (
        *(("stdout", "stderr") if config.getoption("capture", "fd") == "no" else ()),
        *(("terminal",) if shows_setup else ()),
    )


def _rebuilt(warning: Mapping[str, Any]) -> warnings.WarningMessage:
    module, name = warning["category"]
    try:
        category = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        category = UserWarning
    return warnings.WarningMessage(
        message=category(warning["text"]) if _takes_text(category) else warning["text"],
        category=category,
        filename=warning["filename"],
        lineno=warning["lineno"],
    )


def _takes_text(category: type[Warning]) -> bool:
    try:
        category("")
    except TypeError:
        return False
    return True


def _outcome(reports: Sequence[pytest.TestReport]) -> Outcome:
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped for report in reports) else "passed"
