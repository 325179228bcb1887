"""Watches a session for the rule of removal (see `unused`), and removes or reports at its end.

syrupy 7.0 decides by whether text of the command line occurs in a snapshot's path, and counts what
never ran as unused. So it sees none of our files, and leaves alone what plain ``snapshot``
assertions of distributed tests, and of those that record, wrote, where the test did not pass.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS, SETTINGS, WORLD_SIZE_PARAM
from pytest_fsdp_comm.snapshots.names import (
    SUFFIX,
    function_of,
    read_basename,
    written_module,
    written_test,
)
from pytest_fsdp_comm.snapshots.unused import (
    CollectedModule,
    Stamp,
    UnusedSnapshot,
    find_removable,
    find_unused,
    remove,
    snapshot_places,
    stamp_of,
)
from pytest_fsdp_comm.text.codec import dump_document, load_document
from pytest_fsdp_comm.text.counts import counted
from pytest_fsdp_comm.text.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from xdist.workermanage import WorkerController

_NARROWING_SETTINGS: Final = frozenset(
    {"python_files", "python_classes", "python_functions", "testpaths", "norecursedirs"}
)
"""Ini values that choose what is collected; on the command line they choose for this run."""

_EXTENSION: Final = "pytest_fsdp_comm.snapshots.extension"
"""The module of every assertion of our snapshots."""

_OUTPUT: Final = "fsdp_comm_collected"
"""Under which name a worker of xdist gives its controller a `_Session`, as JSON."""
_KIND: Final = "session"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    name: str
    """As `names.written_test` writes it."""
    variant: str
    nodeid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A test module that has snapshots."""

    path: Path
    """Of its source."""
    stamp: Stamp
    """Of its source, before it was imported."""
    tests: tuple[_Test, ...]
    """All that it has, selected or not."""
    is_whole: bool
    """As `CollectedModule.is_whole`."""
    doubts: Mapping[str, str]
    """As `CollectedModule.doubts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What one process collected, and what it compared."""

    modules: Mapping[str, _Module]
    """By the directory of their snapshots, relative to that of all snapshots."""
    selected_count: int
    ours: tuple[str, ...]
    """Node ids of the selected tests that run on ranks, record or show a tree."""
    is_selection: bool
    """Whether tests were deselected, or files left out without being collected."""
    compared: tuple[str, ...]
    """Paths of the snapshot files that its assertions compared or wrote."""


_NOTHING: Final = _Session(modules={}, selected_count=0, ours=(), is_selection=False, compared=())
"""Of a session that ended before all was collected."""


class UnusedSnapshots:
    """Registered once in each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        """Starts before collection.

        Args:
            config: Of the session.
        """
        self._config = config
        self._options = config.stash[OPTIONS]
        # Every child of a module or class, before --lf, node ids and -k narrow the list.
        self._children: dict[pytest.Collector, list[pytest.Item | pytest.Collector]] = {}
        self._unasked: set[pytest.Collector] = set()
        self._stamps: dict[Path, Stamp] = {}
        self._session = _NOTHING
        self._finished: set[str] = set()
        self._passed: set[str] = set()
        self._unfinished: set[str] = set()
        self._started_workers = 0
        self._of_workers: list[_Session] = []
        # Before others write: what they record while this session runs is not in its hands.
        self._at_start = (
            {} if hasattr(config, "workerinput") else find_removable(self._options.snapshot_dir)
        )
        self._unused: list[UnusedSnapshot] = []
        self._doubtful: list[UnusedSnapshot] = []
        self._are_removed = False

    @property
    def found(self) -> Sequence[UnusedSnapshot]:
        """The unused files, known from the end of the session on."""
        return self._unused

    @property
    def are_removed(self) -> bool:
        """Whether they were deleted."""
        return self._are_removed

    @property
    def is_failure(self) -> bool:
        """Whether they fail a session."""
        option = self._config.option
        return bool(self._unused) and not (option.update_snapshots or option.warn_unused_snapshots)

    # Collection.

    # Innermost, so that it sees the list before --lf and node ids narrow it.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Notes what a module or class holds, and whether it was collected at all."""
        if not isinstance(collector, (pytest.File, pytest.Class)):
            return (yield)
        self._stamps.setdefault(collector.path, stamp_of(collector.path))
        # --lf answers for a file without asking it.
        asked = _Asked(collector)
        try:
            report = yield
        finally:
            asked.forget()
        if asked.is_asked and report.passed:
            self._children[collector] = list(report.result)
        elif not asked.is_asked:
            self._unasked.add(collector)
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Sums up, once it is known which tests are selected."""
        selected = set(session.items)
        seen = [item for children in self._children.values() for item in children]
        is_selection = bool(self._unasked) or any(
            isinstance(item, pytest.Item) and item not in selected for item in seen
        )
        self._session = _Session(
            modules=self._modules(selected, is_selection=is_selection),
            selected_count=len({item.nodeid for item in session.items}),
            ours=tuple(item.nodeid for item in session.items if _is_ours(item)),
            is_selection=is_selection,
            compared=(),
        )
        # Collected nodes are many.
        self._children.clear()

    def _modules(self, selected: set[pytest.Item], *, is_selection: bool) -> dict[str, _Module]:
        collectors_of: defaultdict[Path, list[pytest.Module]] = defaultdict(list)
        for collector in {*self._children, *self._unasked}:
            if isinstance(collector, pytest.Module) and not isinstance(collector, self._doctests):
                collectors_of[collector.path].append(collector)
        named = _Arguments(self._config)
        modules: dict[str, _Module] = {}
        for path, collectors in collectors_of.items():
            place = str(written_module(path, self._options.snapshot_anchor))
            directory = self._options.snapshot_dir / place
            if not directory.is_dir():
                continue
            is_whole = named.selects_whole(path) and all(
                self._is_whole(collector, selected) for collector in collectors
            )
            items = [item for collector in collectors for item in self._items(collector)]
            # Of a module without tests, nothing could be deselected.
            is_whole = is_whole and (bool(items) or not is_selection)
            modules[place] = _Module(
                path=path,
                stamp=self._stamps[path],
                tests=tuple(
                    _Test(
                        name=written_test(snapshot_test_name(item)),
                        variant=snapshot_variant(item),
                        nodeid=item.nodeid,
                    )
                    for item in items
                ),
                is_whole=is_whole,
                doubts=self._doubts(path, directory, items) if is_whole else {},
            )
        return modules

    def _doubts(
        self, module: Path, directory: Path, items: Sequence[pytest.Item]
    ) -> dict[str, str]:
        """What may define each test that has files and was not collected."""
        siblings: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            siblings[written_test(snapshot_test_name(item))].append(item)
        with_files = {read_basename(path.stem) for path in directory.glob(f"*{SUFFIX}")}
        missing = {test[0] for test in with_files if test is not None} - siblings.keys()
        if not missing:
            return {}
        for name in [*siblings]:
            siblings[function_of(name)] += siblings[name]
        from pytest_fsdp_comm.snapshots.sources import read_module  # noqa: PLC0415  # few sessions need it

        source = read_module(module, self._options.snapshot_anchor)
        doubts = {}
        for name in missing:
            function = function_of(name)
            if siblings[function]:
                calls = [getattr(item, "callspec", None) for item in siblings[function]]
                given = {param for call in calls if call is not None for param in call.params}
                used = {name for item in siblings[function] for name in _fixtures_of(item)}
                doubt = source.find_parameters(
                    function, used=used | given, given=given - {WORLD_SIZE_PARAM}
                )
            else:
                doubt = source.find(function)
            if doubt is not None:
                doubts[name] = doubt
        return doubts

    @property
    def _doctests(self) -> tuple[type, ...]:
        plugin = self._config.pluginmanager.get_plugin("doctest")
        found = getattr(plugin, "DoctestModule", None)
        return (found,) if isinstance(found, type) else ()

    def _is_whole(self, collector: pytest.Collector, selected: set[pytest.Item]) -> bool:
        return collector in self._children and all(
            child in selected if isinstance(child, pytest.Item) else self._is_whole(child, selected)
            for child in self._children[collector]
        )

    def _items(self, collector: pytest.Collector) -> Iterable[pytest.Item]:
        for child in self._children.get(collector, ()):
            if isinstance(child, pytest.Item):
                yield child
            else:
                yield from self._items(child)

    # The run.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes which tests passed; in xdist's controller, too."""
        # A skipped subtest, say, may be the one that compares.
        if not report.passed:
            self._unfinished.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Notes which tests came to an end."""
        self._finished.add(nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Counts xdist's workers: of one that dies, nothing is known."""
        del node
        self._started_workers += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """Reads what a worker collected and compared."""
        del error
        text = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if text is not None:
            self._of_workers.append(load_document(_Session, _KIND, _VERSION, text))

    # The end.

    # Before syrupy's own hook, which removes what plain assertions did not ask for.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Removes with ``--snapshot-update``, and otherwise fails a session that passed."""
        if self._options.launched and not self._options.launched.is_leader:
            return (yield)
        passed = self._passed - self._unfinished
        own = replace(self._session, compared=self._compared())
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_OUTPUT] = dump_document(_KIND, _VERSION, own)
            return (yield)
        whole = _united(own, self._of_workers)
        has_lost = len(self._of_workers) < self._started_workers
        kept = [nodeid for nodeid in whole.ours if has_lost or nodeid not in passed]
        if kept:
            from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # few sessions need it

            replay.keep_plain_snapshots(self._config, kept)
        is_over = (
            exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
            and not (session.shouldstop or session.shouldfail or has_lost)
            and not self._config.option.collectonly
            and len(self._finished) >= whole.selected_count
        )
        if is_over and not self._config.option.disable_unused_snapshots:
            found = self._find(whole, passed)
            self._unused = [unused for unused in found if not unused.doubt]
            self._doubtful = [unused for unused in found if unused.doubt]
        self._decide(session)
        return (yield)

    def _compared(self) -> tuple[str, ...]:
        """The paths of the snapshot files that assertions of this process compared or wrote."""
        if _EXTENSION not in sys.modules:
            return ()  # whoever compares one imports it, which takes longer than a short session
        from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # see above

        return tuple(replay.compared_files(self._config))

    def _find(self, collected: _Session, passed: set[str]) -> list[UnusedSnapshot]:
        root = self._options.snapshot_dir
        if not root.is_dir():
            return []
        # Of a source that a checkout replaced, what ran tells nothing.
        replaced = {
            place
            for place, module in collected.modules.items()
            if module.stamp != stamp_of(module.path)
        }
        modules = {
            Path(place): CollectedModule(
                tests=frozenset((test.name, test.variant) for test in module.tests),
                passed=frozenset(
                    (test.name, test.variant)
                    for test in module.tests
                    if test.nodeid in passed and place not in replaced
                ),
                is_whole=module.is_whole and place not in replaced,
                doubts=module.doubts,
            )
            for place, module in collected.modules.items()
        }
        anchor = self._options.snapshot_anchor
        is_full = not collected.is_selection and _Arguments(self._config).hold_all(
            anchor / place for place in snapshot_places(root)
        )
        now = find_removable(root)
        compared = {os.path.realpath(path) for path in collected.compared}
        return find_unused(
            root,
            modules,
            removable=[
                path
                for path, stamp in self._at_start.items()
                if now.get(path) == stamp and os.path.realpath(path) not in compared
            ],
            full_anchor=anchor if is_full else None,
        )

    def _decide(self, session: pytest.Session) -> None:
        if not self._unused:
            return
        if self._removes:
            remove(self._options.snapshot_dir, (unused.path for unused in self._unused))
            self._are_removed = True
        elif self.is_failure:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @property
    def _removes(self) -> bool:
        option = self._config.option
        new_only = getattr(option, "update_new_snapshots_only", False)
        return bool(option.update_snapshots and not option.no_cleanup and not new_only)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names every unused file, and says what to do."""
        if hasattr(self._config, "workeroutput"):
            return
        # Where nothing would be removed, the tests of another machine are no news.
        if self._doubtful and (self._removes or self._config.option.verbose > 0):
            self._tell_doubtful(terminalreporter)
        if not self._unused:
            return
        count = len(self._unused)
        files = counted(count, "snapshot file")
        terminalreporter.write_sep("-", "unused communication snapshots")
        what = "deleted" if self._are_removed else "unused"
        terminalreporter.write_line(f"{files} {what}:", yellow=True)
        for unused in self._unused:
            shown = show_path(unused.path, self._config.rootpath)
            terminalreporter.write_line(f"  {shown}: {unused.reason}")
        if not self._are_removed:
            it = "it" if count == 1 else "them"
            terminalreporter.write_line(
                f"Run the same tests with --snapshot-update to delete {it}; "
                "--snapshot-warn-unused only warns."
            )

    def _tell_doubtful(self, terminalreporter: pytest.TerminalReporter) -> None:
        files = counted(len(self._doubtful), "snapshot file")
        terminalreporter.write_sep("-", "communication snapshots that stay")
        terminalreporter.write_line(
            f"{files} not deleted: a branch that this run did not take may define the test, by"
        )
        for unused in self._doubtful:
            shown = show_path(unused.path, self._config.rootpath)
            terminalreporter.write_line(f"  {shown}: {unused.doubt}")
        terminalreporter.write_line("Delete by hand what belongs to tests that are gone.")


def _is_ours(item: pytest.Item) -> bool:
    fixtures = {"comm_mode", "fsdp_tree"}.intersection(getattr(item, "fixturenames", ()))
    return SETTINGS in item.stash or bool(fixtures)


def _united(own: _Session, of_workers: Sequence[_Session]) -> _Session:
    """What one process knows, or all workers of xdist, each of which collected the same."""
    first = of_workers[0] if of_workers else own
    compared = (*own.compared, *(path for worker in of_workers for path in worker.compared))
    return replace(first, compared=compared)


def _fixtures_of(item: pytest.Item) -> Sequence[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else ()


class _Asked:
    """Whether a collector is asked for its children; `forget` ends the watch."""

    def __init__(self, collector: pytest.Collector) -> None:
        self.is_asked = False
        self._collector = collector
        collect = collector.collect

        def noting_collect() -> Iterable[pytest.Item | pytest.Collector]:
            self.is_asked = True
            return collect()

        collector.collect = noting_collect  # type: ignore[method-assign]  # this one object, for one call

    def forget(self) -> None:
        vars(self._collector).pop("collect", None)


class _Arguments:
    """What the command line, or ini ``testpaths``, named."""

    def __init__(self, config: pytest.Config) -> None:
        self._named_by_node: set[Path] = set()
        self._whole: list[Path] = []
        self._has_unknown_node = False
        for argument in config.args:
            base, bracket, _ = str(argument).partition("[")
            path, separator, _ = base.partition("::")
            absolute = Path(config.invocation_params.dir, path)
            is_node = bool(separator or bracket)
            if not absolute.exists():
                # The name of a package, with --pyargs.
                self._has_unknown_node |= is_node
            elif is_node:
                self._named_by_node.add(absolute.resolve())
            else:
                self._whole.append(absolute.resolve())
        self._option = config.option
        settings = {setting.partition("=")[0] for setting in config.option.override_ini or ()}
        self._narrows = bool(settings & _NARROWING_SETTINGS)

    def selects_whole(self, module: Path) -> bool:
        """Nothing on the command line chose among a module's tests."""
        if self._option.keyword or self._option.markexpr or self._narrows:
            return False
        module = module.resolve()
        if any(module.is_relative_to(whole) for whole in self._whole):
            return True
        return not self._has_unknown_node and module not in self._named_by_node

    def hold_all(self, places: Iterable[Path]) -> bool:
        """Every place is below a directory that was named, and nothing was left out of these."""
        option = self._option
        if option.keyword or option.markexpr or option.deselect or self._narrows:
            return False
        if option.ignore or option.ignore_glob:
            return False
        if self._named_by_node or self._has_unknown_node:
            return False
        directories = [path for path in self._whole if path.is_dir()]
        return all(
            any(place.resolve().is_relative_to(directory) for directory in directories)
            for place in places
        )
