"""The ``comm_snapshot`` fixture's assertion, and the syrupy extension behind it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, cast

import pytest
from syrupy.assertion import AssertionResult, SnapshotAssertion
from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.profile import CommProfile, remove_activation_sizes
from pytest_fsdp_comm.errors import (
    EmptyRecordingError,
    FsdpCommError,
    IncompleteRecordingError,
    RanksDivergedError,
    SnapshotFormatError,
    printable,
)
from pytest_fsdp_comm.gathering import gather_values
from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OBSERVER, OPTIONS, SETTINGS
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.snapshots.documents import (
    Profile,
    SnapshotText,
    body,
    differs,
    divergence_of,
    has_lost_ranks,
    read_snapshot,
)
from pytest_fsdp_comm.snapshots.failed_comparison import COMPARED, UNEXPLAINED
from pytest_fsdp_comm.snapshots.lines import REMEDY
from pytest_fsdp_comm.snapshots.names import PART, SUFFIX, make_basename, module_to_directory
from pytest_fsdp_comm.text.files import EXPECTED, RECEIVED, is_nested, write_atomically
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_path, take_first
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import merge, tree_facts

if TYPE_CHECKING:
    from pytest_fsdp_comm.reports.explanation import Failure

# Sends this rank's string to all ranks of the test; returns all ranks' strings in rank order.
Gather: TypeAlias = Callable[[str], list[str]]

UNWRITTEN: Final = pytest.StashKey["dict[str, AssertionResult]"]()
"""Stash key of the results, keyed by file, that an update writes once the test has passed."""

BOUND: Final = pytest.StashKey["CommSnapshot"]()
"""Stash key of a test's ``comm_snapshot``; set from the fixture's setup until the test ends."""

UNUSED: Final = (
    "comm_snapshot was requested but never compared, so this test passes whatever is sent:\n"
    "  compare it in the test or in a fixture (atexit is too late): "
    "assert comm_mode == comm_snapshot\n"
    "  or remove the fixture, or call pytest.skip() if there is nothing to compare;\n"
    "  if a fixture requests it for tests that do not all compare, let the fixture call "
    "comm_snapshot(allow_unused=True)"
)

# Used instead of a path in errors about a snapshot that has not been written to a file yet.
_RECORDING: Final = "the recording"

# The first and last lines of the error for each kind of gap. The list of gaps goes in between.
_REFUSED: Final = {
    "unseen": (
        "comm_mode could not record everything that was sent, so nothing was compared or written:\n"
        "use torch.distributed, in a thread that no earlier comm_mode block started; to compare "
        "the incomplete recording, use comm_snapshot(allow_unseen=True)"
    ),
    "idle_model": (
        "the model passed to comm_mode did not run, so nothing was compared or written:\n"
        "pass the model that runs, after it is wrapped; if this model is not supposed to run, use "
        "comm_snapshot(allow_idle_model=True)"
    ),
    "value_dependent": (
        "the fake group exchanges no values, so calls that depend on values may be recorded "
        "wrongly, and nothing was compared or written:\n"
        'run the test with backend="gloo", or replace the values with constants; if these values '
        "do not change what is sent, use comm_snapshot(allow_value_dependent=True)"
    ),
}
_DIVERGED: Final = (
    "nothing was written: a backend matches the calls of a process group by their order, so all "
    "its ranks must issue the same calls in the same order"
)
# Maximum number of gaps to list. The error then has at most 8 lines; pytest truncates longer ones.
_MAX_GAPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The value of one comparison, and the options that ``comm_snapshot(...)`` sets for it."""

    name: str = ""
    """The ``name`` argument, which becomes part of the file's name; empty if not passed."""
    allowed: frozenset[str] = frozenset()
    """Kinds of gaps to accept; ``empty`` accepts values that would raise EmptyRecordingError."""
    activation_nbytes: bool = True
    value: object = None
    location: str = ""


class CommSnapshotExtension(SingleFileSnapshotExtension):
    """Store each assertion in a separate file; `bind_extension` creates an extension for a test."""

    _write_mode = WriteMode.TEXT
    file_extension = SUFFIX.removeprefix(".")

    def __init__(self, item: pytest.Item, gather: Gather | None) -> None:
        """Read a test's settings; `gather` is None if the test runs in one process."""
        super().__init__()
        settings = item.stash.get(SETTINGS, None)
        self._ranks: tuple[int, ...] = settings.ranks if settings else ()
        self._world_size = settings.world_size if settings else 1
        self._gather = gather or (lambda text: [text])
        self._updates = bool(item.config.option.update_snapshots)
        self._options = item.config.stash[OPTIONS]
        self._rootdir = item.config.rootpath
        # The text that an update writes to each file. If two comparisons in a test use the same
        # file, their texts must be equal, because the update would write only one of them.
        self._updated: dict[str, str] = {}

    def serialize(self, data: _Comparison, **_: Any) -> SnapshotText:
        """Merge all ranks' values into one snapshot; raise if they are empty or incomplete."""
        profile = self._check_and_gather_profile(data)
        if isinstance(profile, CommProfile):
            check_completeness(profile, allowed=data.allowed)
            # If there is a file, compare with it, because the failure also explains that change.
            if profile.divergence and (self._updates or not Path(data.location).exists()):
                raise RanksDivergedError(f"{profile.divergence}\n{_DIVERGED}")
            if not data.activation_nbytes:
                profile = remove_activation_sizes(profile)
        try:
            text = SnapshotText.from_profile(profile, where=_RECORDING)
            if self._updates:
                # Parse the text now, so that an update writes no file that later runs cannot read.
                profile = SnapshotText(str(text), where=_RECORDING).profile
        except SnapshotFormatError as problem:
            raise FsdpCommError(
                f"{str(problem).removesuffix(REMEDY)}The recording is too large for a snapshot: "
                "compare a part of the model, or fewer ranks"
            ) from None
        if self._updates and body(self._updated.setdefault(data.location, text)) != body(text):
            file = self._show_location(data.location)
            raise FsdpCommError(
                f"this test compares two different recordings with {file}, and an update cannot "
                "write both: give the second one a name, "
                'comm_snapshot(name="second")'
            )
        return text

    def _check_and_gather_profile(self, data: _Comparison) -> Profile:
        value, allow_empty = data.value, "empty" in data.allowed
        if hasattr(value, "merged_profile"):
            profile: CommProfile = value.merged_profile(allow_divergence=True)
            if not (
                profile.collectives or allow_empty or self._has_reviewed_collectives(data.location)
            ):
                raise EmptyRecordingError(
                    "the recording has no collectives, so a snapshot of it would check nothing: is "
                    "the model sharded, and does it run inside `with comm_mode(model):`? If the "
                    "test expects that nothing is sent, use comm_snapshot(allow_empty=True)"
                )
            return profile
        if isinstance(value, ShardTree):
            if not value.is_distributed and not allow_empty:
                raise EmptyRecordingError(
                    "the tree has no unit and no DTensor, so a snapshot of it would check nothing: "
                    "is fully_shard(model) or DistributedDataParallel(model) missing? If the test "
                    "expects a model that is not sharded, use comm_snapshot(allow_empty=True)"
                )
            trees = gather_values(self._gather, "fsdp_tree", tree_facts(value))
            return merge(
                dict(zip(self._ranks or range(len(trees)), trees, strict=True)),
                backend=value.backend,
                torch_version=value.torch_version,
            )
        label = type(value).__name__
        if isinstance(value, Mapping):
            label = f"a dict with the keys {list(value)!r:.80}" if value else "an empty dict"
        raise FsdpCommError(
            "comm_snapshot compares comm_mode, fsdp_tree(model), or a dict of these by name "
            'such as {"comm": comm_mode, "tree": fsdp_tree(model)}, got '
            f"{label}; for other values use syrupy's plain `snapshot` fixture"
        )

    def _has_reviewed_collectives(self, location: str) -> bool:
        """Return whether the snapshot has collectives that a comparison can report as removed."""
        reviewed = read_snapshot(Path(location), where=self._show_location(location))
        profile = reviewed.profile if reviewed and not self._updates else None
        return isinstance(profile, CommProfile) and bool(profile.collectives)

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Return whether compared facts are equal; if updating all ranks, compare texts instead."""
        old: SnapshotText = snapshot_data
        if isinstance(serialized_data, SnapshotText) and divergence_of(serialized_data.profile):
            return False
        if body(serialized_data) == body(old):
            return True
        # Parse the file first, so that a broken file raises instead of being overwritten.
        reviewed = old.profile
        is_partial = len(self._ranks) not in {0, self._world_size}
        if self._updates and not is_partial:
            return False
        # A replayed assertion passes a plain str (see Note [Replay]).
        new = serialized_data
        if not isinstance(new, SnapshotText):
            new = SnapshotText(new, where=_RECORDING)
        loses_ranks = has_lost_ranks(reviewed, new.profile)
        if self._updates and not loses_ranks:
            return False
        is_same = not differs(old, new)
        if self._updates and not is_same:
            ranks = name_ranks(reviewed.recorded_ranks) if reviewed.recorded_ranks else "all ranks"
            raise FsdpCommError(
                f"{old.lines.where} was recorded on {ranks}, but this run recorded only "
                f"{name_ranks(self._ranks)} of {self._world_size}, so the update would lose ranks; "
                "nothing was overwritten. Update on the same ranks (gloo and nccl run all ranks, "
                "--comm-backend fake does not), or delete the file to record only these ranks"
            )
        return is_same

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> SnapshotText | None:
        """Read a file; raise if it is broken, so that not even an update overwrites it."""
        del snapshot_name, session_id
        path = Path(snapshot_location)
        return read_snapshot(path, where=self._show_location(snapshot_location))

    def _show_location(self, location: str) -> str:
        return show_path(Path(location), self._rootdir)

    @classmethod
    def write_snapshot(cls, **_: Any) -> None:
        """Write nothing: `replay.settle_updates` writes the file once the test has passed."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """Return ``<snapshot directory>/<path of the test module without .py>``."""
        config = test_location.item.config
        module = module_to_directory(Path(test_location.filepath), config.rootpath)
        return str(config.stash[OPTIONS].snapshot_dir / module)

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: Any) -> str:
        """Return ``<test name>.<variant>[.<name or index>]``."""
        item = test_location.item
        return make_basename(snapshot_test_name(item), snapshot_variant(item), index)

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: Any = 0) -> str:
        """Return a name that begins with the test's name, so that syrupy assigns it to the test."""
        file = cls.get_file_basename(test_location=test_location, index=index)
        return f"{test_location.snapshot_name}[{file}]"

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        """Return True, because syrupy's check does not understand the plugin's file names."""
        return True

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Hide all files from syrupy, which would delete unused ones; `unused` reports them."""
        return SnapshotCollections()

    def keep_artifacts(self, location: str, *, received: str | None, expected: str | None) -> None:
        """Save both sides of a comparison for ``--comm-artifacts``; None deletes a side's file."""
        if (directory := self._options.artifacts_dir) is None:
            return
        try:
            # Write the expected file first, so that it is complete once the received file exists.
            for side, text in ((EXPECTED, expected), (RECEIVED, received)):
                path = directory / side / Path(location).relative_to(self._options.snapshot_dir)
                _check_outside_snapshots(path.parent, self._options.snapshot_dir)
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, text)
        except OSError as problem:
            # Only warn, because the failed comparison is reported anyway.
            warnings.warn(
                printable(
                    f"--comm-artifacts: cannot write the recording ({problem}), so `fsdp-comm "
                    "accept` cannot accept it"
                ),
                pytest.PytestWarning,
                stacklevel=1,
            )

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """Yield the diff of two snapshots, without their first lines, which are never compared."""
        yield from super().diff_lines(body(serialized_data), body(snapshot_data))


def _check_outside_snapshots(path: Path, snapshot_dir: Path) -> None:
    # The session refuses to start with such a directory, but cannot know all links inside it.
    if is_nested(path, snapshot_dir):
        raise OSError(f"{show_path(path)} leads into the snapshot directory")


def check_completeness(profile: CommProfile, *, allowed: AbstractSet[str] = frozenset()) -> None:
    """Raise IncompleteRecordingError if a profile has a gap of a kind that is not allowed."""
    for kind, text in _REFUSED.items():
        gaps = [gap for gap in profile.gaps if gap.kind == kind]
        if not gaps or kind in allowed:
            continue
        before, after = text.split("\n")
        lines = [
            f"  {gap.text}{f' (on {name_ranks(gap.ranks)})' if gap.ranks else ''}" for gap in gaps
        ]
        listed, num_more = take_first(lines, _MAX_GAPS)
        more = [f"  and {num_more} more"] if num_more else []
        raise IncompleteRecordingError("\n".join((before, *listed, *more, after)))


def bind_extension(item: pytest.Item, gather: Gather | None = None) -> type[CommSnapshotExtension]:
    """Return a factory for a test's extension; omit `gather` if the test runs in one process."""
    # syrupy's annotation asks for a class, but syrupy only calls it, without arguments.
    return cast("type[CommSnapshotExtension]", partial(CommSnapshotExtension, item, gather))


class CommSnapshot(SnapshotAssertion):
    """syrupy's assertion with further options, and support for comparing the values of a dict."""

    def __post_init__(self) -> None:
        self.last_results: tuple[tuple[str, AssertionResult], ...] = ()
        """Name and result of each value in the last comparison; a single value is named ``""``."""
        self.allows_unused = False
        self.explains = True
        """Whether this rank explains failures; the other ranks only report the first line."""
        self.failures: dict[str, Failure] = {}
        """The explained failures of the last comparison, keyed by value name."""
        self.compared_at = ""
        """The call site of the first comparison that failed, as ``path:line``."""
        self._comparisons = 0
        self._changes = _Comparison()
        self._index: str | int = 0
        super().__post_init__()

    def __call__(  # noqa: PLR0913  # each is a separate option
        self,
        *,
        allow_empty: bool = False,
        allow_value_dependent: bool = False,
        allow_idle_model: bool = False,
        allow_unseen: bool = False,
        allow_unused: bool = False,
        activation_nbytes: bool = True,
        **changes: Any,
    ) -> Self:
        """Set options for the next comparison.

        Args:
            allow_empty: Accept a recording without collectives, or a tree without units and
                DTensors.
            allow_value_dependent: Accept a recording made with the fake group even if the recorded
                code reads values of tensors, which may be wrong with that group.
            allow_idle_model: Accept a recording of ``comm_mode(model)`` in which no module of the
                model ran, but another model sent something.
            allow_unseen: Accept a recording in which some of the communication is missing.
            allow_unused: Accept a test that compares nothing.
            activation_nbytes: Whether to compare the sizes of activations. If False, the snapshot
                has a line that says so; count, kind, axis and dtype are still compared.
            changes: Arguments of syrupy's ``snapshot``; ``name`` selects a separate file.
        """
        __tracebackhide__ = True
        allowed = {
            "empty": allow_empty,
            "value_dependent": allow_value_dependent,
            "idle_model": allow_idle_model,
            "unseen": allow_unseen,
        }
        if not isinstance(activation_nbytes, bool):
            raise TypeError(f"activation_nbytes={activation_nbytes!r}: expected True or False")
        super().__call__(**changes)
        self.allows_unused |= allow_unused
        self._changes = _Comparison(
            name=str(changes.get("name") or ""),
            allowed=self._changes.allowed.union(filter(allowed.get, allowed)),
            activation_nbytes=activation_nbytes and self._changes.activation_nbytes,
        )
        return self

    @property
    def extension(self) -> CommSnapshotExtension:
        return cast("CommSnapshotExtension", super().extension)

    @property
    def index(self) -> str | int:
        """The part of a file's name that tells the files of a test apart (see `make_basename`)."""
        # Unlike syrupy's index, this stays constant while a value is being compared, and it counts
        # comparisons instead of values.
        return self._index

    def __eq__(self, other: object) -> bool:
        """Compare one value, or every value of a dict, even after one of them differs.

        ``{"comm": comm_mode, "tree": fsdp_tree(model)}`` uses the same files as
        ``comm_mode == comm_snapshot`` and ``fsdp_tree(model) == comm_snapshot(name="tree")``.
        """
        __tracebackhide__ = True
        if BOUND not in self.test_location.item.stash:
            raise FsdpCommError(
                f"comm_snapshot was compared after {self.test_location.testname} had ended (in an "
                "atexit handler or another test?), too late to fail the test: compare it in the "
                "test, or in one of its fixtures"
            )
        # Pass an empty dict, or one whose keys cannot be names, to `serialize`, which rejects it.
        values: Mapping[str, object] = {"": other}
        if isinstance(other, Mapping) and all(
            isinstance(key, str) and key and PART not in key for key in other
        ):
            values = other or values
        self.failures = {}
        try:
            self.last_results = tuple(
                (key, self._compare_value(key, value)) for key, value in values.items()
            )
            item = self.test_location.item
            observer = item.config.stash.get(OBSERVER, None)
            if observer is not None:
                observer.note_comparison(self, values)
            is_same = all(result.success for _, result in self.last_results)
            if not is_same and UNEXPLAINED not in item.stash:
                self.compared_at = find_call_site()
                # Store a copy, because the next comparison replaces the results.
                item.stash[UNEXPLAINED] = copy.copy(self)
            return is_same
        finally:
            self._comparisons += 1
            self._changes = _Comparison()

    def __ne__(self, other: object) -> bool:
        __tracebackhide__ = True
        raise FsdpCommError(
            "comm_snapshot was compared with !=, which would pass for any different recording, and "
            "which no update can satisfy: assert comm_mode == comm_snapshot, or assert "
            "comm_mode.counts(...) to check that something is sent"
        )

    def _compare_value(self, key: str, value: object) -> AssertionResult:
        first = self._changes.name or (str(self._comparisons) if self._comparisons else "")
        # The value "comm" of a dict uses the same file as a single value.
        self._index = PART.join(filter(None, (first, "" if key == "comm" else key))) or 0
        location = self.extension.get_location(test_location=self.test_location, index=self._index)
        super().__eq__(replace(self._changes, value=value, location=location))
        item = self.test_location.item
        item.stash[COMPARED][show_path(location, item.config.rootpath)] = None
        result = self.executions[self.num_executions - 1]
        note_update(item, result)
        if self.explains and (result.created or result.updated):
            _warn_about_notes(value, location)
        if result.success:
            # Delete the artifacts of an earlier, failed run, or `fsdp-comm accept` would use them.
            self.extension.keep_artifacts(location, received=None, expected=None)
        return result

    def __repr__(self) -> str:
        """Return only the test's name, because pytest prints this in every failure."""
        return f"<CommSnapshot of {self.test_location.testname}>"

    __hash__ = None  # type: ignore[assignment]  # as in syrupy: a comparison has side effects


def _warn_about_notes(value: object, location: str) -> None:
    """Show what a recording lacks when it becomes a snapshot; a comparison would pass later."""
    recording: Recording | None = getattr(value, "recording", None)
    for note in recording.notes if recording is not None else ():
        text = printable(f"{show_path(Path(location))}: {note}")
        warnings.warn(text, pytest.PytestWarning, stacklevel=1)


def note_update(item: pytest.Item, result: AssertionResult) -> None:
    """If an update changes the file, store the result until the test has passed."""
    if result.created or result.updated:
        item.stash.setdefault(UNWRITTEN, {})[result.snapshot_location] = result


def bind_snapshot(
    snapshot: SnapshotAssertion, item: pytest.Item, gather: Gather | None, *, explains: bool = True
) -> CommSnapshot:
    """Create a test's ``comm_snapshot`` from its syrupy ``snapshot``."""
    assertion = CommSnapshot(
        session=snapshot.session,
        extension_class=bind_extension(item, gather),
        test_location=snapshot.test_location,
        update_snapshots=snapshot.update_snapshots,
        update_new_snapshots_only=snapshot.update_new_snapshots_only,
    )
    assertion.explains = explains
    item.stash[BOUND], item.stash[COMPARED] = assertion, {}
    return assertion


def end_comparisons(item: pytest.Item) -> bool:
    """End a test's comparisons; return whether to fail the test because it compared nothing."""
    snapshot = item.stash.get(BOUND, None)
    if snapshot is None:
        return False
    del item.stash[BOUND]
    is_called = not item.config.getoption("setuponly", default=False)
    return is_called and not (snapshot.allows_unused or item.stash[COMPARED])
