"""Find snapshot files that no test compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_fsdp_comm.marker import may_record, snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.reports.explanation import MOVE_COMMAND
from pytest_fsdp_comm.snapshots.failed_comparison import failure_of, print_shared_changes
from pytest_fsdp_comm.snapshots.names import (
    directory_to_module,
    escape_test_name,
    module_to_directory,
    read_basename,
    strip_test_parameters,
)
from pytest_fsdp_comm.snapshots.neighbours import (
    COLLECTED,
    MISSING,
    list_snapshot_files,
    path_from,
    read_text_or_empty,
)
from pytest_fsdp_comm.text.words import shell_word, show_count, show_path

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Note [Unused files]: a file is unused if no test compared it although all tests of its module were
# collected. In addition, its test function must be gone, or all tests of the function must have
# passed, at least one of them at the file's world size. So the files of deselected tests are not
# unused. The files of a deleted module are unused if pytest's arguments name a directory that
# contained the module. A run that collects only some tests of a module (node ids, `--lf`), or ends
# early, reports no unused files. The plugin deletes no file. It hides its files from
# syrupy, which would delete unused ones (`discover_snapshots` returns none).

_HEADER: Final = "# pytest-fsdp-comm "
# The first comparison imports this module. Do not import it earlier, because the import takes
# longer than a short session.
_EXTENSION: Final = "pytest_fsdp_comm.snapshots.extension"
# Key of the collected tests and compared files in a worker's output to the xdist controller.
_OUTPUT: Final = "fsdp_comm_collected"


class UnusedSnapshots:
    """Plugin that finds and prints unused snapshot files; one for each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self.files: Sequence[Path] = ()
        """The unused files; empty until the session ends."""
        self._config = config
        self._options = config.stash[OPTIONS]
        # Whether each module was collected without an error or a skip.
        self._modules: dict[Path, bool] = {}
        self._collected: Sequence[pytest.Item] = ()
        # Function (`names.strip_test_parameters`), variant (``ws4``) and node id of all tests,
        # keyed by the snapshot directory of the module, including deselected tests. None if only
        # some tests of a module were collected.
        self._all_tests: dict[str, list[tuple[str, str, str]]] | None = None
        # The selected tests that run on ranks, or request a fixture of this plugin.
        self._selected: set[str] = set()
        self._called: set[str] = set()
        self._unpassed: set[str] = set()
        # Whether each completed phase and subtest of the running test passed.
        self._phases: list[bool] = []
        self._started_workers = 0
        self._worker_outputs: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Record which modules are collected, and whether collecting one failed or was skipped."""
        report = yield
        module = collector.getparent(pytest.Module)
        if module is not None:
            self._modules[module.path] = self._modules.get(module.path, True) and report.passed
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """List all tests before other plugins deselect some."""
        self._collected = [*items]
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected = {item.nodeid for item in session.items if may_record(item)}
        if _is_partial_collection(self._config):
            return
        self._config.stash[COLLECTED] = self._collected
        root = self._options.snapshot_dir
        directories = {
            path: str(module_to_directory(path, self._config.rootpath)) for path in self._modules
        }
        self._all_tests = {
            directory: []
            for path, directory in directories.items()
            if self._modules[path] and (root / directory).is_dir()
        }
        for item in self._collected:
            if (tests := self._all_tests.get(directories.get(item.path, ""))) is not None:
                function = strip_test_parameters(escape_test_name(snapshot_test_name(item)))
                tests.append((function, snapshot_variant(item), item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record which tests passed. pytest also calls this in xdist's controller."""
        if report.when == "setup":
            # If the test is rerun, only its last run counts.
            self._called.discard(report.nodeid)
            self._unpassed.discard(report.nodeid)
        # Do not use `report.failed`: a skipped subtest may contain the comparison.
        if not report.passed:
            self._unpassed.add(report.nodeid)
        elif report.when == "call":
            self._called.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """End a test without ranks: write updates if it passed; fail it if there are problems."""
        report = yield
        # Do not do this in `pytest_runtest_logreport`: plugins that rerun tests call it too late.
        self._phases = [*([] if report.when == "setup" else self._phases), report.passed]
        is_over = report.when == "teardown" and _EXTENSION in sys.modules
        if is_over and (problems := _import_replay().end_test(item, has_passed=all(self._phases))):
            report.outcome = "failed"
            report.longrepr = "\n\n".join(problems)
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Count started xdist workers, to detect one that crashes and sends no output."""
        del node
        self._started_workers += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """Read a worker's collected tests and compared files."""
        del error
        data = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if data is not None:
            self._worker_outputs.append(data)

    # Runs before syrupy's hook, which writes plain snapshots and removes unused ones.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Find unused files; if there are any, fail a session that would otherwise pass."""
        if self._options.launched and not self._options.launched.is_leader:
            return (yield)
        passed = self._called - self._unpassed
        compared: set[str] = set()
        if _EXTENSION in sys.modules:
            _import_replay().forget_unwritten(session)
            compared.update(_import_replay().compared_files(self._config))
        if hasattr(self._config, "workeroutput"):
            output = {
                "all": self._all_tests,
                "selected": [*self._selected],
                "compared": [*compared],
            }
            self._config.workeroutput[_OUTPUT] = output
            return (yield)
        for data in self._worker_outputs:
            # All xdist workers collect the same tests, so keep the last worker's list. But each
            # worker runs only some of them, so combine the files that the workers compared.
            self._all_tests, self._selected = data["all"], {*data["selected"]}
            compared.update(data["compared"])
        has_lost = len(self._worker_outputs) < self._started_workers
        if nodeids := [nodeid for nodeid in self._selected if has_lost or nodeid not in passed]:
            _import_replay().keep_plain_snapshots(self._config, nodeids)
        has_ended = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and not (
            session.shouldstop or session.shouldfail or has_lost
        )
        option = self._config.option
        # Report nothing if no test ran, as with --setup-plan.
        is_reported = (passed or self._unpassed) and not option.disable_unused_snapshots
        if has_ended and is_reported and self._all_tests is not None:
            self.files = [*self._find_unused_files(self._all_tests, passed, compared)]
        if self._has_unused_files_that_fail():
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        return (yield)

    def _has_unused_files_that_fail(self) -> bool:
        """Whether unused files make the session fail, as in syrupy."""
        option = self._config.option
        is_allowed = option.update_snapshots or option.warn_unused_snapshots
        return bool(self.files) and not is_allowed

    def _find_unused_files(
        self,
        all_tests: Mapping[str, Sequence[tuple[str, str, str]]],
        passed: AbstractSet[str],
        compared: AbstractSet[str],
    ) -> Iterator[Path]:
        """Yield the unused files (see Note [Unused files])."""
        root = self._options.snapshot_dir
        start = self._config.invocation_params.dir
        arguments = [Path(start, str(argument)).resolve() for argument in self._config.args]
        for path in list_snapshot_files(root):
            directory, parts = path.parent.relative_to(root), read_basename(path.stem)
            if (
                parts is None
                or str(path) in compared
                or not read_text_or_empty(path).startswith(_HEADER)
            ):
                continue
            if str(directory) in all_tests:
                function, variant = strip_test_parameters(parts[0]), parts[1]
                tests = [test for test in all_tests[str(directory)] if test[0] == function]
                has_this_world_size = not tests or variant in {size for _, size, _ in tests}
                if has_this_world_size and all(nodeid in passed for *_, nodeid in tests):
                    yield path
                continue
            module = directory_to_module(directory, self._config.rootpath)
            if not module.exists() and any(
                top.is_dir() and module.resolve().is_relative_to(top) for top in arguments
            ):
                yield path

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print changes that made several tests fail, then unused files, with commands for both."""
        print_shared_changes(terminalreporter)
        failures = map(failure_of, terminalreporter.getreports("failed"))
        errors = [
            text
            for failure in failures
            if failure is not None
            for text in (
                failure.head,
                *failure.heads,
                *(entry.text for entry in failure.select("error")),
            )
        ]
        moves = dict.fromkeys(match[0] for text in errors if (match := MOVE_COMMAND.search(text)))
        if moves:
            terminalreporter.write_sep("-", "communication snapshots of renamed tests")
            terminalreporter.write_line("To move them:")
            for command in moves:
                terminalreporter.write_line(f"  {command}")
        files = [
            (path, argument)
            for path in self.files
            for argument in [path_from(self._config, path)]
            if not any(f"mv -n {shell_word(argument)} " in command for command in moves)
        ]
        if not files:
            return
        write = terminalreporter.write_line
        terminalreporter.write_sep("-", "unused communication snapshots")
        effect = ", so the run fails" if self._has_unused_files_that_fail() else ""
        count = show_count(len(files), "snapshot file")
        write(f"{count} that no test compared{effect}:", yellow=True)
        for path, _ in files:
            write(f"  {show_path(path, self._config.rootpath)}")
        if any(MISSING in text for text in errors):
            write(
                "Some tests have no snapshot yet. If you renamed or moved them, move these files "
                "instead of removing them."
            )
            return
        paths = [argument for _, argument in files]
        # git would treat brackets, which ids of parametrized tests contain, as patterns.
        literal = "--literal-pathspecs " if re.search(r"[*?\[\\]", "".join(paths)) else ""
        write(f"To remove them: git {literal}rm {' '.join(map(shell_word, paths))}")


def _import_replay() -> ModuleType:
    from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # few sessions need it

    return replay


def _is_partial_collection(config: pytest.Config) -> bool:
    """Return whether options or arguments keep some tests of a module from being collected."""
    option = config.option
    names_tests = any("::" in str(argument) for argument in config.args)
    return (
        names_tests
        or getattr(option, "lf", False)
        or "python_" in " ".join(option.override_ini or ())
    )
