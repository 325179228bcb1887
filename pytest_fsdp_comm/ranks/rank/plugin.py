"""The pytest hooks of a rank: process group, simulation, output, reports and warnings."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from operator import methodcaller
from os import getpid
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.rank import process_group, processes
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.ranks.rank.isolation import require_private_names
from pytest_fsdp_comm.ranks.rank.kept_output import cut_middle, cut_middles, read_log_parts
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import Debugging, RankCommand, RankSetSpec
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, WarningSeen
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.upstream import private_names

if TYPE_CHECKING:
    from pytest_fsdp_comm.recording.value_dependence import KeptAnswers
    from pytest_fsdp_comm.simulation.groups import DistinctRanks, RealGroups


# Ranks shorten these parts of a report, but not data that plugins add, such as images.
_TEXTS = ("longrepr", "sections", "wasxfail", "_subtest.context")


def _make_phase_hook(when: str) -> object:
    # Make this the innermost wrapper, so that a child that the test forks ends here, before it
    # returns to the hooks of other plugins.
    @pytest.hookimpl(wrapper=True, trylast=True, specname=f"pytest_runtest_{when}")
    def hook(self: RankPlugin, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with (
            self._collect_output_and_end_forks(item, when),
            private_names("a class or module that a rank reads"),
        ):
            try:
                result = yield
            except (FsdpCommError, RuntimeError) as error:
                if self._answers is None:  # the test is not simulated
                    raise
                from pytest_fsdp_comm.simulation import world  # noqa: PLC0415  # loads torch

                if isinstance(error, FsdpCommError):
                    raise world.strip_inner_frames(error) from None
                world.add_memory_remedy(error)
                raise
            if when == "call" and self._real is not None:
                self._real.check_axes_exist()
            return result

    return hook


class RankPlugin:
    """Implements a rank's pytest hooks; created before the fork, and bound to the rank after it."""

    def __init__(self, config: pytest.Config, *, shares_random_states: bool) -> None:
        """Prepare the hooks; if random states are not shared, a test's setup makes them equal."""
        self._config = config
        self._shares_random_states = shares_random_states
        self._logs: list[_Log] = []
        self._has_failed_subtest = False
        # Contexts that begin before a test's first fixture and end after its last teardown.
        self._simulation = contextlib.ExitStack()
        self._distinct: DistinctRanks | None = None
        self._answers: KeptAnswers | None = None
        self._real: RealGroups | None = None
        capture_subtests(self._collect_subtest_output)

    def bind(self, channel: Channel[RankCommand], spec: RankSetSpec, rank: int) -> None:
        """Connect the hooks to a rank."""
        self._group: object = None
        self._random_states: list[Any] | None = None
        self.has_failed = False
        """Whether a phase or subtest has failed since `bind`."""
        self._channel = channel
        self._pid = getpid()
        self._logs = [_Log(name, spec.log_path(rank, name)) for name in ("stdout", "stderr")]

    # Make this the innermost wrapper, so that the warning filters of the test apply.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run the test; then report exceptions from finalizers and threads as a failed teardown."""
        with self._simulation:
            handled = yield
        self._run_as_teardown(item, partial(processes.raise_lost_exceptions, item))
        return handled

    def _run_as_teardown(self, item: pytest.Item, end: Callable[[], None]) -> None:
        """Call `end` after the test's teardown; if it raises, report that as a failed teardown."""

        def run() -> None:
            __tracebackhide__ = True
            with self._collect_output_and_end_forks(item, "teardown"):
                end()

        call = pytest.CallInfo.from_call(run, when="teardown")
        if call.excinfo is not None:
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
            item.ihook.pytest_runtest_logreport(report=report)

    def end_tests(self, item: pytest.Item) -> None:
        """Tear down all fixtures, because no other test will run; report failures for `item`."""
        # Pass None to tear down all fixtures, as pytest does at the end of a session.
        tear_down = item.session._setupstate.teardown_exact  # noqa: SLF001
        self._run_as_teardown(item, partial(tear_down, None))
        self._run_as_teardown(item, partial(processes.raise_lost_exceptions, item))

    def run_exit_functions(self, item: pytest.Item) -> None:
        """Run the functions that the rank registered with `atexit`; warn about their exceptions."""
        # Bypass warning filters, which could turn the warnings into errors: Python itself only
        # prints exceptions at exit.
        for text in processes.run_exit_functions():
            category, line = pytest.PytestUnraisableExceptionWarning, (item.location[1] or 0) + 1
            warning = warnings.WarningMessage(text, category, str(item.path), line)
            self.pytest_warning_recorded(warning, "runtest", item.nodeid, None)

    # pytest evaluates skip marks in a tryfirst hook, before this one, so a skipped test creates no
    # process group. pytest sets up fixtures after this hook, because it calls the hook of the most
    # recently registered plugin first.
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        __tracebackhide__ = methodcaller("errisinstance", FsdpCommError)
        self._has_failed_subtest = False
        context = item.config.stash[RANK_CONTEXT]
        settings = context.settings
        if self._group is None:
            self._group = process_group.join_group(context)
            if not self._shares_random_states:
                processes.equalize_random_states(context.exchange)
            if settings.scope == "module":
                # Each test that these ranks run starts with the random states of the first test.
                self._random_states = processes.read_random_states()
        elif self._random_states is not None:
            processes.restore_random_states(self._random_states)
        if settings.simulation:
            from pytest_fsdp_comm.recording.value_dependence import answers_of_process  # noqa: PLC0415  # loads torch
            from pytest_fsdp_comm.simulation.world import simulate_rank  # noqa: PLC0415  # as above

            self._real = process_group.connect_real_groups(context)
            self._answers = answers_of_process
            self._answers.begin_test({*getattr(item, "fixturenames", ())})
            self._simulation.enter_context(
                simulate_rank(
                    assumes=settings.simulation == "answering",
                    shares=settings.simulation_splits,
                    groups=self._real,
                )
            )
        self._distinct = None
        if settings.adds_distinct_ranks:
            from pytest_fsdp_comm.simulation.groups import DistinctRanks  # noqa: PLC0415  # as above

            self._distinct = DistinctRanks()
            self._simulation.enter_context(self._distinct.watch_parameters())
            context.exchange.before = self._skip_to_run_on_further_ranks

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """Save values assumed in a shared fixture's setup, for all tests that use the fixture."""
        if self._answers is None or fixturedef.scope == "function":
            return (yield)
        with self._answers.store_for(fixturedef.argname):
            return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        if self._answers is not None:
            self._answers.forget_fixture(fixturedef.argname)

    def _skip_to_run_on_further_ranks(self) -> None:
        if ranks := self.further_ranks():
            # Raise a skip: it neither opens a debugger under --pdb nor fails the comparison.
            raise pytest.skip.Exception(f"runs again, also on {name_ranks(ranks)}")

    def further_ranks(self) -> tuple[int, ...]:
        """Return the ranks that the test must also run on, because their local shapes differ."""
        return () if self._distinct is None else tuple(sorted(self._distinct.further))

    def leave_group(self) -> None:
        self._group = None
        process_group.leave_group()

    def can_run_another_test(self) -> bool:
        """Return whether the test has neither destroyed nor replaced the rank's process group."""
        import torch.distributed as dist  # noqa: PLC0415  # not in the pytest process

        return self._group is None or self._group is dist.group.WORLD

    # This hook cannot be called pytest_runtest_setup, because a hook above has that name.
    pytest_take_output_of_setup = _make_phase_hook("setup")
    pytest_runtest_call = _make_phase_hook("call")
    pytest_runtest_teardown = _make_phase_hook("teardown")

    @contextlib.contextmanager
    def _collect_output_and_end_forks(self, item: pytest.Item, when: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            processes.end_forked_child(self._pid, error)
            raise
        else:
            processes.end_forked_child(self._pid, None)
        finally:
            for log in self._logs:
                text = log.end_phase()
                if text:
                    item.add_report_section(when, log.name, text)

    @contextlib.contextmanager
    def _collect_subtest_output(self, captured: SimpleNamespace) -> Iterator[None]:
        for log in self._logs:
            log.begin_subtest()
        try:
            yield
        finally:
            captured.out, captured.err = (log.end_subtest() for log in self._logs)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a phase's report at once, because the rank may die in the next phase."""
        self.has_failed |= report.failed
        if is_subtest(report):
            self._has_failed_subtest |= report.failed
        elif self._has_failed_subtest and report.passed:
            # In the hook below, pytest 9 fails tests with failed subtests. The terminal reporter
            # usually calls the hook, but a rank has no terminal reporter, so call it here.
            self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        self._channel.send(
            PhaseReport(
                report=_serialize_report(self._config, report),
                is_subtest=is_subtest(report),
                precedes_debugger=report.failed
                and self._config.pluginmanager.has_plugin("pdbinvoke"),
                nbytes_reported={log.name: log.nbytes_reported for log in self._logs},
            )
        )

    def pytest_enter_pdb(self) -> None:
        self._channel.send(Debugging(has_begun=True))

    def pytest_leave_pdb(self) -> None:
        self._channel.send(Debugging(has_begun=False))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        # pytest replays earlier warnings to every new plugin. The pytest process has reported those
        # already, so send only warnings that tests raised.
        if when == "runtest" and self._logs:
            self._channel.send(
                WarningSeen(
                    text=cut_middle(str(warning_message.message)),
                    category_module=warning_message.category.__module__,
                    category_name=warning_message.category.__qualname__,
                    filename=warning_message.filename,
                    lineno=warning_message.lineno,
                    nodeid=nodeid,
                    location=location,
                )
            )


def _serialize_report(config: pytest.Config, report: pytest.TestReport) -> dict[str, object]:
    data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
    texts = {name: cut_middles(data[name]) for name in _TEXTS if name in data}
    pairs = data.get("user_properties", ())
    properties = [(name, _shorten_value(value)) for name, value in pairs]
    # A report created by a plugin may lack the time at which the phase ended.
    stop = data.get("stop") or time.time()
    return {**data, **texts, "user_properties": properties, "stop": stop}


def _shorten_value(value: object) -> object:
    """Shorten a user property; a long value that is not a string becomes its shortened repr."""
    text = value if isinstance(value, str) else repr(value)
    short = cut_middle(text)
    return value if short == text else short


# Private names of pytest 9 and pytest-subtests (checked in pytest 8.4 to 9.2, pytest-subtests
# 0.15): ``capturing_output(request)`` yields a ``Captured`` with ``out`` and ``err``.
_SUBTEST_MODULES = ("_pytest.subtests", "pytest_subtests.plugin")


def is_subtest(report: pytest.TestReport) -> bool:
    """Return whether a report describes a subtest; a test continues after a failed subtest."""
    return type(report).__name__.lower() == "subtestreport"


def capture_subtests(capture: Callable[[Any], object]) -> None:
    """Make pytest capture the output of subtests with the context manager `capture`."""
    for name in _SUBTEST_MODULES:
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        require_private_names(module, name, "capturing_output", "Captured")
        module.capturing_output = partial(_capture_subtest_output, module.Captured, capture)


@contextlib.contextmanager
def _capture_subtest_output(
    make_captured: Callable[[], object],
    capture: Callable[[Any], Any],
    request: pytest.FixtureRequest,
) -> Iterator[object]:
    captured = make_captured()
    manager: Any = request.config.pluginmanager.getplugin("capturemanager")
    test_captures = getattr(manager, "_capture_fixture", None) is not None
    is_off = request.config.getoption("capture", "no") == "no" or test_captures
    with contextlib.nullcontext() if is_off else capture(captured):
        yield captured


class _Log:
    """The log file of a stream; keeps track of the parts that no report contains yet."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = path.open("rb", buffering=0)
        self._nbytes_seen = 0
        self.nbytes_reported = 0
        """The size of the log when the last phase ended."""
        # Lists of (start, end) ranges: one list for the phase, then one for each nested subtest.
        self._parts: list[list[tuple[int, int]]] = [[]]

    def begin_subtest(self) -> None:
        self._note_newly_written_bytes()
        self._parts.append([])

    def end_subtest(self) -> str:
        self._note_newly_written_bytes()
        return read_log_parts(self._file.fileno(), self._parts.pop())

    def end_phase(self) -> str:
        self._note_newly_written_bytes()
        parts, self._parts = [*itertools.chain(*self._parts)], [[]]
        self.nbytes_reported = self._nbytes_seen
        return read_log_parts(self._file.fileno(), parts)

    def _note_newly_written_bytes(self) -> None:
        with contextlib.suppress(ValueError, OSError, AttributeError):
            getattr(sys, self.name).flush()
        end = os.fstat(self._file.fileno()).st_size
        if end > self._nbytes_seen:
            self._parts[-1].append((self._nbytes_seen, end))
            self._nbytes_seen = end
