"""Watches a session for the rule of removal, and removes or reports unused files at its end."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_fsdp_comm.marker import may_record, snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS, WORLD_SIZE_PARAM
from pytest_fsdp_comm.snapshots.names import (
    SUFFIX,
    function_of,
    read_basename,
    written_module,
    written_test,
)
from pytest_fsdp_comm.snapshots.unused import (
    CollectedModule,
    CollectedTest,
    Stamp,
    UnusedSnapshot,
    find_removable,
    find_unused,
    remove,
    stamp_of,
)
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.words import counted, show_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from xdist.workermanage import WorkerController

# Note [Removal without syrupy]: syrupy 7.0 decides by whether text of the command line occurs in a
# snapshot's path, and counts what never ran as unused. So it sees none of our files (see Note [Rule
# of removal]), and leaves alone what plain ``snapshot`` assertions of distributed tests, and of
# those that record, wrote, where the test did not pass.

# Ini values that choose what is collected; given on the command line, for this run only.
_NARROWING_SETTINGS: Final = frozenset(
    {"python_files", "python_classes", "python_functions", "testpaths", "norecursedirs"}
)

# The name under which an xdist worker hands its controller a `_Session` as JSON.
_OUTPUT: Final = "fsdp_comm_collected"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What one process collected, and what it compared."""

    modules: Mapping[str, CollectedModule] = field(default_factory=dict)
    """By the directory of their snapshots, relative to that of all snapshots."""
    selected_count: int = 0
    ours: tuple[str, ...] = ()
    """Node ids of the selected tests that run on ranks, record or show a tree."""
    is_selection: bool = False
    """Whether tests were deselected, or files left out without being collected."""
    compared: tuple[str, ...] = ()
    """Paths of the snapshot files that its assertions compared or wrote."""


class UnusedSnapshots:
    """Registered once in each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        """Begin before collection."""
        self.found: Sequence[UnusedSnapshot] = ()
        """The unused files, known from the end of the session on."""
        self.are_removed = False
        self._config = config
        self._options = config.stash[OPTIONS]
        # Every child of a file or class, before --lf, node ids and -k narrow the list; None where
        # they are not known.
        self._children: dict[pytest.Collector, list[pytest.Item | pytest.Collector] | None] = {}
        self._leaves_out_files = False
        self._stamps: dict[Path, Stamp] = {}
        self.collected = _Session()
        """What was collected, known from the end of the collection on."""
        self._finished: set[str] = set()
        # Whether all reports of a test passed so far, that of its call among them.
        self._has_passed: dict[str, bool] = {}
        self._started_workers = 0
        self._of_workers: list[_Session] = []
        # Taken before tests write: a file that is new or changed after this is never removed.
        self._at_start = (
            {} if hasattr(config, "workerinput") else find_removable(self._options.snapshot_dir)
        )
        self._doubtful: Sequence[UnusedSnapshot] = ()

    @property
    def is_failure(self) -> bool:
        """Whether unused files fail a session."""
        option = self._config.option
        return bool(self.found) and not (option.update_snapshots or option.warn_unused_snapshots)

    # Collection.

    # Innermost, to see the list before --lf and node ids narrow it.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Note what a module or class holds, and whether it was collected at all."""
        if not isinstance(collector, (pytest.File, pytest.Class)):
            return (yield)
        self._stamps.setdefault(collector.path, stamp_of(collector.path))
        # --lf answers for a file without collecting it.
        collect, is_collected = collector.collect, False

        def collect_and_note() -> Iterable[pytest.Item | pytest.Collector]:
            nonlocal is_collected
            is_collected = True
            return collect()

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(collector), "collect", collect_and_note)
            report = yield
        is_known = is_collected and report.passed
        self._children[collector] = list(report.result) if is_known else None
        self._leaves_out_files |= not is_collected
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Sum up, once it is known which tests are selected."""
        selected = set(session.items)
        seen = [child for children in self._children.values() for child in children or ()]
        is_selection = self._leaves_out_files or any(
            isinstance(child, pytest.Item) and child not in selected for child in seen
        )
        self.collected = _Session(
            modules=self._modules(selected, is_selection=is_selection),
            selected_count=len({item.nodeid for item in session.items}),
            ours=tuple(item.nodeid for item in session.items if may_record(item)),
            is_selection=is_selection,
        )
        # Collected nodes are many.
        self._children.clear()

    def _modules(
        self, selected: set[pytest.Item], *, is_selection: bool
    ) -> dict[str, CollectedModule]:
        items_of: defaultdict[Path, list[pytest.Item | None]] = defaultdict(list)
        for collector in self._children:
            # Doctests have no snapshots.
            if isinstance(collector, pytest.Module) and type(collector).__name__ != "DoctestModule":
                items_of[collector.path] += self._items(collector)
        modules: dict[str, CollectedModule] = {}
        for path, found in items_of.items():
            place = str(written_module(path, self._options.snapshot_anchor))
            directory = self._options.snapshot_dir / place
            if not directory.is_dir():
                continue
            items = [item for item in found if item is not None]
            is_whole = (
                len(items) == len(found)
                and selected.issuperset(items)
                # If a module has no tests, nothing shows whether some were deselected.
                and (bool(items) or not is_selection)
                and not _is_narrowed(self._config)
            )
            modules[place] = CollectedModule(
                path=path,
                stamp=self._stamps[path],
                tests=tuple(
                    CollectedTest(
                        name=written_test(snapshot_test_name(item)),
                        variant=snapshot_variant(item) if item in selected else "",
                        nodeid=item.nodeid,
                    )
                    for item in items
                ),
                is_whole=is_whole,
                doubts=self._doubts(path, directory, items) if is_whole else {},
            )
        return modules

    def _items(self, collector: pytest.Collector) -> Iterator[pytest.Item | None]:
        """All tests below; None for those of a collector whose children are not known."""
        children = self._children.get(collector)
        for child in [None] if children is None else children:
            if isinstance(child, pytest.Collector):
                yield from self._items(child)
            else:
                yield child

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
                given: set[str] = set()
                used: set[str] = set()
                for item in siblings[function]:
                    given |= getattr(getattr(item, "callspec", None), "params", {}).keys()
                    used |= {*getattr(item, "fixturenames", ())}
                doubt = source.find_parameters(
                    function, used=used | given, given=given - {WORLD_SIZE_PARAM}
                )
            else:
                doubt = source.find(function)
            if doubt is not None:
                doubts[name] = doubt
        return doubts

    # The run.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests passed; in xdist's controller, too."""
        # A skipped subtest, say, may be the one that compares.
        if not report.passed:
            self._has_passed[report.nodeid] = False
        elif report.when == "call":
            self._has_passed.setdefault(report.nodeid, True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note which tests came to an end."""
        self._finished.add(nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Count xdist's workers: of one that dies, nothing is known."""
        del node
        self._started_workers += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """Read what a worker collected and compared."""
        del error
        data = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if data is not None:
            self._of_workers.append(from_json(_Session, data))

    # The end.

    # Before syrupy's own hook, which removes what plain assertions did not ask for.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Remove files with ``--snapshot-update``; otherwise fail a session that passed."""
        if self._options.launched and not self._options.launched.is_leader:
            return (yield)
        own = replace(self.collected, compared=self._compared())
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_OUTPUT] = to_json(own)
            return (yield)
        # Each worker of xdist collected the same, and compared what it ran.
        every = [own, *self._of_workers]
        whole = replace(
            self._of_workers[0] if self._of_workers else own,
            compared=tuple(path for one in every for path in one.compared),
        )
        has_lost = len(self._of_workers) < self._started_workers
        passed = {nodeid for nodeid, has_passed in self._has_passed.items() if has_passed}
        kept = [nodeid for nodeid in whole.ours if has_lost or nodeid not in passed]
        if kept:
            from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # few sessions need it

            replay.keep_plain_snapshots(self._config, kept)
        option = self._config.option
        is_over = (
            exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
            and not (session.shouldstop or session.shouldfail or has_lost or option.collectonly)
            and len(self._finished) >= whole.selected_count
        )
        if is_over and not option.disable_unused_snapshots:
            unused = self._find(whole, passed)
            self.found = [one for one in unused if not one.doubt]
            self._doubtful = [one for one in unused if one.doubt]
        if self.found and self._removes:
            remove(self._options.snapshot_dir, (unused.path for unused in self.found))
            self.are_removed = True
        elif self.is_failure:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        return (yield)

    def _compared(self) -> tuple[str, ...]:
        # A comparison imports this module, which takes longer than a short session.
        if "pytest_fsdp_comm.snapshots.extension" not in sys.modules:
            return ()
        from pytest_fsdp_comm.snapshots import replay  # noqa: PLC0415  # see above

        return tuple(replay.compared_files(self._config))

    def _find(self, collected: _Session, passed: set[str]) -> list[UnusedSnapshot]:
        root, anchor = self._options.snapshot_dir, self._options.snapshot_anchor
        is_full = not (collected.is_selection or _is_narrowed(self._config)) and _covers(
            self._config, {anchor / file.parent.relative_to(root) for file in self._at_start}
        )
        now = find_removable(root)
        compared = {os.path.realpath(path) for path in collected.compared}
        return find_unused(
            root,
            collected.modules,
            passed,
            removable=[
                path
                for path, stamp in self._at_start.items()
                if now.get(path) == stamp and os.path.realpath(path) not in compared
            ],
            full_anchor=anchor if is_full else None,
        )

    @property
    def _removes(self) -> bool:
        option = self._config.option
        new_only = getattr(option, "update_new_snapshots_only", False)
        return bool(option.update_snapshots and not option.no_cleanup and not new_only)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name every unused file, and say what to do."""
        if hasattr(self._config, "workeroutput"):
            return
        write = terminalreporter.write_line

        def write_files(unused: Sequence[UnusedSnapshot]) -> None:
            for one in unused:
                write(f"  {show_path(one.path, self._config.rootpath)}: {one.doubt or one.reason}")

        # Without an update nothing would be removed, so this is no news.
        if self._doubtful and (self._removes or self._config.option.verbose > 0):
            files = counted(len(self._doubtful), "snapshot file")
            terminalreporter.write_sep("-", "communication snapshots that stay")
            write(
                f"{files} not deleted: a branch that this run did not take may define the test, by"
            )
            write_files(self._doubtful)
            write("Delete by hand what belongs to tests that are gone.")
        if self.found:
            files = counted(len(self.found), "snapshot file")
            terminalreporter.write_sep("-", "unused communication snapshots")
            write(f"{files} {'deleted' if self.are_removed else 'unused'}:", yellow=True)
            write_files(self.found)
            if not self.are_removed:
                it = "it" if len(self.found) == 1 else "them"
                write(
                    f"Run the same tests with --snapshot-update to delete {it}; "
                    "--snapshot-warn-unused only warns."
                )


def _is_narrowed(config: pytest.Config) -> bool:
    option = config.option
    settings = {setting.partition("=")[0] for setting in option.override_ini or ()}
    names_tests = any("::" in str(argument) for argument in config.args)
    return bool(names_tests or option.keyword or option.markexpr or settings & _NARROWING_SETTINGS)


def _covers(config: pytest.Config, places: Iterable[Path]) -> bool:
    """Whether the command line named directories above all places, and left out nothing of them."""
    option = config.option
    if option.deselect or option.ignore or option.ignore_glob:
        return False
    # `config.args` are those of ini `testpaths`, or the current directory, where none was given.
    named = [Path(config.invocation_params.dir, str(path)).resolve() for path in config.args]
    directories = [path for path in named if path.is_dir()]
    return all(any(map(place.resolve().is_relative_to, directories)) for place in places)
