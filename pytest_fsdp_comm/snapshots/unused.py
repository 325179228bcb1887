"""Snapshot files that no test compares: listed after a run, and offered where one is missing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pytest

from pytest_fsdp_comm.marker import may_record, snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.snapshots.failed_comparison import print_shared_changes
from pytest_fsdp_comm.snapshots.names import (
    SUFFIX,
    function_of,
    named_module,
    read_basename,
    written_module,
    written_test,
)
from pytest_fsdp_comm.text.words import counted, shell_word, show_path

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# Note [Unused files]: a file is unused if no test compared it, its module was collected whole, and
# either no test has its function's name, or all tests that have it passed, one of them at this
# world size. So are the files of a module that no longer exists, below a directory that was given.
# A run that selects or deselects tests, or ends early, reports nothing, and nothing is ever
# deleted: syrupy does not see these files (`discover_snapshots` finds none).

# The first words of each file.
_HEADER: Final = "# pytest-fsdp-comm "
# A comparison imports this module, which takes longer than a short session.
_EXTENSION: Final = "pytest_fsdp_comm.snapshots.extension"
# On the config's stash: whether the session has all tests of the modules that it collected.
_IS_WHOLE: Final = pytest.StashKey[bool]()
# The name under which an xdist worker hands its controller what it collected and compared.
_OUTPUT: Final = "fsdp_comm_collected"


class UnusedSnapshots:
    """Registered once in each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self.found: Sequence[Path] = ()
        """The unused files, known from the end of the session on."""
        self._config = config
        self._options = config.stash[OPTIONS]
        # Whether a module was collected without an error.
        self._modules: dict[Path, bool] = {}
        self._num_collected = 0
        # By the directory of its snapshots, the tests of each whole module: function
        # (`names.function_of`), variant (``ws4``) and node id. None if tests were left out.
        self._whole: dict[str, list[tuple[str, str, str]]] | None = None
        # The selected tests that run on ranks, record or show a tree.
        self._ours: set[str] = set()
        self._called: set[str] = set()
        self._unpassed: set[str] = set()
        # Whether each phase of the test that runs here has passed so far, and its subtests.
        self._phases: list[bool] = []
        self._started_workers = 0
        self._of_workers: list[dict[str, Any]] = []

    # Collection.

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Note which modules are collected, and whether that failed or was skipped."""
        report = yield
        module = collector.getparent(pytest.Module)
        if module is not None:
            self._modules[module.path] = self._modules.get(module.path, True) and report.passed
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Count all tests before any are deselected."""
        self._num_collected = len(items)
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._ours = {item.nodeid for item in session.items if may_record(item)}
        # Not by `pytest_deselected`: plugins that split a run may not call it.
        is_whole = len(session.items) >= self._num_collected and not _selects_tests(self._config)
        self._config.stash[_IS_WHOLE] = is_whole
        if not is_whole:
            return
        root = self._options.snapshot_dir
        places = {path: str(written_module(path, self._config.rootpath)) for path in self._modules}
        self._whole = {
            place: []
            for path, place in places.items()
            if self._modules[path] and (root / place).is_dir()
        }
        for item in session.items:
            if (tests := self._whole.get(places.get(item.path, ""))) is not None:
                function = function_of(written_test(snapshot_test_name(item)))
                tests.append((function, snapshot_variant(item), item.nodeid))

    # The run.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests passed; in xdist's controller, too."""
        if report.when == "setup":
            # Another attempt at the same test counts by itself.
            self._called.discard(report.nodeid)
            self._unpassed.discard(report.nodeid)
        # A skipped subtest, say, may be the one that compares.
        if not report.passed:
            self._unpassed.add(report.nodeid)
        elif report.when == "call":
            self._called.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write the updates of a test without ranks that has passed; an error fails it."""
        report = yield
        # Not by `pytest_runtest_logreport`, which plugins that run tests again call too late.
        self._phases = [*([] if report.when == "setup" else self._phases), report.passed]
        is_over = report.when == "teardown" and _EXTENSION in sys.modules
        if is_over and (problems := _replay().end_test(item, has_passed=all(self._phases))):
            report.outcome = "failed"
            report.longrepr = "\n\n".join(problems)
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Count xdist's workers: if one dies, nobody knows what it compared."""
        del node
        self._started_workers += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """Read what a worker collected and compared."""
        del error
        data = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if data is not None:
            self._of_workers.append(data)

    # The end.

    # Before syrupy's own hook, which writes, and removes what plain assertions did not ask for.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Find unused files, which fail a session that passed."""
        if self._options.launched and not self._options.launched.is_leader:
            return (yield)
        passed = self._called - self._unpassed
        compared: set[str] = set()
        if _EXTENSION in sys.modules:
            compared.update(_replay().compared_files(self._config))
        if hasattr(self._config, "workeroutput"):
            output = {"whole": self._whole, "ours": [*self._ours], "compared": [*compared]}
            self._config.workeroutput[_OUTPUT] = output
            return (yield)
        for data in self._of_workers:
            # Each worker of xdist collected the same, and compared what it ran.
            self._whole, self._ours = data["whole"], {*data["ours"]}
            compared.update(data["compared"])
        has_lost = len(self._of_workers) < self._started_workers
        if kept := [nodeid for nodeid in self._ours if has_lost or nodeid not in passed]:
            _replay().keep_plain_snapshots(self._config, kept)
        has_ended = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and not (
            session.shouldstop or session.shouldfail or has_lost
        )
        option = self._config.option
        # A run such as --setup-plan runs none.
        is_told = (passed or self._unpassed) and not option.disable_unused_snapshots
        if has_ended and is_told and self._whole is not None:
            self.found = [*self._find(self._whole, passed, compared)]
        # As syrupy has it.
        if self.found and not (option.update_snapshots or option.warn_unused_snapshots):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        return (yield)

    def _find(
        self,
        whole: Mapping[str, Sequence[tuple[str, str, str]]],
        passed: AbstractSet[str],
        compared: AbstractSet[str],
    ) -> Iterator[Path]:
        """Apply Note [Unused files]."""
        root = self._options.snapshot_dir
        here = self._config.invocation_params.dir
        arguments = [Path(here, str(argument)).resolve() for argument in self._config.args]
        for path in _snapshot_files(root):
            place, parts = path.parent.relative_to(root), read_basename(path.stem)
            if parts is None or str(path) in compared or not _text(path).startswith(_HEADER):
                continue
            if str(place) in whole:
                function, variant = function_of(parts[0]), parts[1]
                tests = [test for test in whole[str(place)] if test[0] == function]
                is_run = not tests or variant in {size for _, size, _ in tests}
                if is_run and all(nodeid in passed for *_, nodeid in tests):
                    yield path
                continue
            module = named_module(place, self._config.rootpath)
            if not module.exists() and any(
                one.is_dir() and module.resolve().is_relative_to(one) for one in arguments
            ):
                yield path

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name shared changes and every unused file, and print what accepts or removes them."""
        print_shared_changes(terminalreporter)
        if not self.found:
            return
        write = terminalreporter.write_line
        terminalreporter.write_sep("-", "unused communication snapshots")
        write(f"{counted(len(self.found), 'snapshot file')} that no test compared:", yellow=True)
        for path in self.found:
            write(f"  {show_path(path, self._config.rootpath)}")
        paths = [_from(self._config, path) for path in self.found]
        # To git, the brackets of parameters match other names too.
        literal = "--literal-pathspecs " if re.search(r"[*?\[\\]", "".join(paths)) else ""
        write(f"If they are not needed: git {literal}rm {' '.join(map(shell_word, paths))}")


def _replay() -> ModuleType:
    from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # few sessions need it

    return replay


def _selects_tests(config: pytest.Config) -> bool:
    """Whether the command line leaves out tests of a module before they are collected."""
    option = config.option
    names_tests = any("::" in str(argument) for argument in config.args)
    return (
        names_tests
        or getattr(option, "lf", False)
        or "python_" in " ".join(option.override_ini or ())
    )


def _snapshot_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob(f"*{SUFFIX}") if path.is_file())


def _from(config: pytest.Config, path: Path) -> str:
    """A path as the user types it where pytest was started."""
    return os.path.relpath(path, config.invocation_params.dir)


# Beside a snapshot that is missing.


def describe_neighbour(item: pytest.Item, missing: Path, text: str) -> str:
    """Name what may be the snapshot that is missing, recorded as `text`; empty if nothing is."""
    name, variant = read_basename(missing.stem) or ("", "")
    index = missing.stem.removeprefix(f"{name}.{variant}")
    orphans: list[Path] = []
    for path in _snapshot_files(item.config.stash[OPTIONS].snapshot_dir):
        test, size = read_basename(path.stem) or ("", "")
        if path.stem != f"{test}.{size}{index}":
            continue
        if path.parent == missing.parent and test == name:
            ranks = counted(int(size.removeprefix("ws")), "rank")
            return f"there is one for {ranks}: {show_path(path, item.config.rootpath)}"
        if size == variant and _is_gone(item, path, test):
            orphans.append(path)
    # First those of a test of this name, then those of this module.
    orphans.sort(key=lambda path: (path.name != missing.name, path.parent != missing.parent))
    content = text.partition("\n")[2]
    same = [path for path in orphans if _text(path).partition("\n")[2] == content]
    near = [path for path in orphans if missing.name == path.name or missing.parent == path.parent]
    if not same and len(near) != 1:
        return ""
    lead = "the same, of a test that is gone:" if same else "was the test renamed?"
    directory, old, new = (
        shell_word(_from(item.config, one)) for one in (missing.parent, (same or near)[0], missing)
    )
    # git makes no directories.
    make = "" if missing.parent.is_dir() else f"mkdir -p {directory} && "
    return f"{lead} {make}git mv {old} {new}"


def _is_gone(item: pytest.Item, path: Path, test: str) -> bool:
    """Whether the test of a file does not exist any more, as far as that is known."""
    directory = path.parent.relative_to(item.config.stash[OPTIONS].snapshot_dir)
    module = named_module(directory, item.config.rootpath)
    if module == item.path and item.config.stash.get(_IS_WHOLE, False):
        names = {snapshot_test_name(one) for one in item.session.items if one.path == module}
        return test not in map(written_test, names)
    return unquote(function_of(test)).rpartition(".")[2] not in _text(module)


def _text(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
