"""Hooks of the pytest plugin; other modules contain the logic."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, Final

import pytest

from pytest_fsdp_comm import fixtures, marker, options, upstream
from pytest_fsdp_comm.launch_environment import (
    LaunchedRank,
    explain_separate_processes,
    is_spawned_rank,
)
from pytest_fsdp_comm.ranks.rank.context import EXTENSIONS
from pytest_fsdp_comm.ranks.rank.gpus import count_usable_gpus
from pytest_fsdp_comm.snapshots import failed_comparison, unused

# On Windows, fork, fcntl and Unix sockets are all missing, so `ranks` cannot be imported there.
_CAN_FORK: Final = hasattr(os, "fork")
_NEEDS_FORK: Final = (
    f"distributed tests fork their ranks, which {sys.platform} does not support; run pytest on "
    "Linux, for example in WSL, a container or a virtual machine"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini values."""
    options.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Prepare a spawned rank before it imports anything of the user."""
    if is_spawned_rank():
        from pytest_fsdp_comm.ranks.rank import main  # noqa: PLC0415  # only in a spawned rank

        main.prepare_spawned_rank()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the fixtures, and parse the options."""
    config.pluginmanager.register(fixtures, "fsdp-comm-fixtures")
    arguments = "".join(
        f"\n    {setting.name}: {setting.argument}" for setting in options.MARKER_ARGUMENTS.values()
    )
    config.addinivalue_line(
        "markers",
        f"{options.MARKER_SIGNATURE}: run the test on several ranks, one process each.{arguments}",
    )
    settings = config.stash[options.OPTIONS] = options.read_session_options(config)
    launched = settings.launched
    is_rank = is_spawned_rank() or (launched is not None and not launched.is_leader)
    if config.pluginmanager.has_plugin("syrupy"):
        config.pluginmanager.register(unused.UnusedSnapshots(config), "fsdp-comm-unused")
        from pytest_fsdp_comm.snapshots import plain_snapshot  # noqa: PLC0415  # it imports syrupy

        plain_snapshot.refuse_recordings(config)
    else:
        config.pluginmanager.register(_WithoutSyrupy(), "fsdp-comm-without-syrupy")
    if settings.report_dir is not None:
        from pytest_fsdp_comm import run_report  # noqa: PLC0415  # only for a report

        run_report.register(config, settings.report_dir, is_rank=is_rank)
    github = {"GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"}
    has_summary = settings.summary_file or not github.isdisjoint(os.environ)
    if has_summary and not (is_rank or hasattr(config, "workerinput")):
        from pytest_fsdp_comm import ci_session  # noqa: PLC0415  # only for summaries and annotations

        config.pluginmanager.register(ci_session.CiSession(config, os.environ), "fsdp-comm-ci")
    if is_spawned_rank():
        from pytest_fsdp_comm.ranks.rank import main  # noqa: PLC0415  # only in a spawned rank

        main.select_own_test(config)


class _WithoutSyrupy:
    @pytest.fixture
    def snapshot(self) -> None:
        pytest.fail(upstream.NEEDS_SYRUPY, pytrace=False)


def pytest_report_header(config: pytest.Config) -> str:
    """Return the header line with the defaults that a test's marker can override."""
    return options.describe(config.stash[options.OPTIONS])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Under a launcher, silence every process except the one that reports for all ranks."""
    launched = session.config.stash[options.OPTIONS].launched
    if launched and not launched.is_leader and not is_spawned_rank():
        from pytest_fsdp_comm.ranks.rank import isolation  # noqa: PLC0415  # only under a launcher

        isolation.hold_terminal(session.config)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the marker's list of world sizes; their ids come last in test names."""
    mark = metafunc.definition.get_closest_marker(options.MARKER_NAME)
    sizes = marker.world_sizes(mark) if mark else None
    if sizes:
        metafunc.fixturenames.append(options.WORLD_SIZE_PARAM)
        ids = [f"ws{size}" for size in sizes]
        metafunc.parametrize(options.WORLD_SIZE_PARAM, sizes, indirect=True, ids=ids)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Resolve the settings of all selected tests; an invalid marker ends the session."""
    launched = session.config.stash[options.OPTIONS].launched
    marker.resolve_items(session, items, count_gpus=partial(count_usable_gpus, launched))
    uses_plugin = any(map(marker.uses_plugin, items)) and not session.config.option.collectonly
    if uses_plugin and not is_spawned_rank() and (text := explain_separate_processes(os.environ)):
        marker.refuse(session, items, text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the fork server before a test can make forks unsafe."""
    launched = session.config.stash[options.OPTIONS].launched
    if any(map(marker.uses_plugin, session.items)) and _CAN_FORK:
        _set_up_ranks(session, launched)
    elif launched:
        # Under a launcher, tests that do not use this plugin run in every process, so let each
        # process print its results.
        from pytest_fsdp_comm.ranks.rank import isolation  # noqa: PLC0415  # only under a launcher

        isolation.release_terminal(session.config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that needs torch or fork() on a system that lacks it."""
    # Fail after skip marks have been evaluated, but before the test's code can raise an obscure
    # error.
    if marker.may_record(item) and (missing := upstream.explain_missing_torch()):
        pytest.fail(missing, pytrace=False)
    if options.SETTINGS in item.stash and not _CAN_FORK:
        pytest.fail(_NEEDS_FORK, pytrace=False)


def _set_up_ranks(session: pytest.Session, launched: LaunchedRank | None) -> None:
    from pytest_fsdp_comm.ranks.session import runner  # noqa: PLC0415  # few sessions need it
    from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # as above

    config = session.config
    if upstream.explain_missing_torch():
        return
    observers = [config.stash[options.OBSERVER]] if options.OBSERVER in config.stash else []
    config.stash[EXTENSIONS] = [replay.RankSnapshots(), *observers]
    if is_spawned_rank():
        from pytest_fsdp_comm.ranks.rank import main  # noqa: PLC0415  # as above

        main.run_spawned_rank(session)
    if config.option.collectonly:
        return
    distributed = [item for item in session.items if options.SETTINGS in item.stash]
    if launched:
        from pytest_fsdp_comm.ranks import launched as launch  # noqa: PLC0415  # as above

        launch.join_session(session, launched)
    elif distributed:
        ranks = runner.RankRunner(session, distributed)
        config.add_cleanup(ranks.close)
        ranks.start()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Let the supervisor of the ranks apply pytest-timeout's limit."""
    # A timer in this process would include the wait for free rank slots, and end the session. A
    # timer in a rank cannot interrupt a collective, because a collective waits in C++.
    if options.SETTINGS not in item.stash:
        return None
    item.stash[options.PLUGIN_TIMEOUT_S] = settings.timeout
    return True


@pytest.hookimpl(wrapper=True)
def pytest_assertrepr_compare(
    op: str, left: object, right: object
) -> Generator[None, list[list[str]], list[list[str]]]:
    """Put the plugin's explanation of a failed comparison before other plugins' explanations."""
    explanations = yield
    sides = (left, right)
    if _has_instance_of(sides, "comm.questions", "Answer"):
        from pytest_fsdp_comm.reports.assertions import explain_answer  # noqa: PLC0415  # only after a failure

        return [explain_answer(op, left, right), *explanations]
    if _has_instance_of(sides, "tree.finding", "Findings"):
        # pytest truncates long explanations, so `pytest_runtest_makereport` adds the findings.
        return [[f"{left!r} {op} {right!r}"], *explanations]
    if not _has_instance_of(sides, "snapshots.extension", "CommSnapshot"):
        return explanations
    from pytest_fsdp_comm.snapshots.explain import explain_comparison  # noqa: PLC0415  # only after a failure

    explanation = explain_comparison(left, right)
    return [explanation, *explanations] if explanation else explanations


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that ignored the result of a failed comparison."""
    yield
    if failed_comparison.UNEXPLAINED in item.stash:
        from pytest_fsdp_comm.snapshots.explain import fail_unasserted  # noqa: PLC0415  # only after a failure

        fail_unasserted(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Explain process group errors, and failed assertions about findings and comparisons."""
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, ValueError) and "torch" in sys.modules:
        from pytest_fsdp_comm.ranks.rank.process_group import add_remedy  # noqa: PLC0415  # only after a failure

        add_remedy(error, item)
    if isinstance(error, AssertionError) and "pytest_fsdp_comm.tree.finding" in sys.modules:
        from pytest_fsdp_comm.reports.assertions import explain_findings  # noqa: PLC0415  # only after a failure

        explain_findings(error)
    if error is not None and failed_comparison.UNEXPLAINED in item.stash and call.when == "call":
        from pytest_fsdp_comm.snapshots.explain import explain_bare_failure  # noqa: PLC0415  # only after a failure

        explain_bare_failure(item, error)
    report = yield
    failed_comparison.add_to_report(item, report)
    return report


def _has_instance_of(values: Iterable[object], module: str, name: str) -> bool:
    """Return whether any value is an instance of a class of this package, without importing it."""
    loaded = sys.modules.get(f"pytest_fsdp_comm.{module}")
    # Do not use isinstance(), which would run user code of proxy objects.
    return loaded is not None and any(
        issubclass(type(value), getattr(loaded, name)) for value in values
    )
