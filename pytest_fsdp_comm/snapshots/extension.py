"""Snapshots through syrupy: where they are, what they hold, how they are compared and written."""

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

from pytest_fsdp_comm.comm.profile import CommProfile, without_activation_sizes
from pytest_fsdp_comm.errors import (
    EmptyRecordingError,
    FsdpCommError,
    IncompleteRecordingError,
    SnapshotFormatError,
)
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OBSERVER, OPTIONS, SETTINGS
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.snapshots.documents import (
    EXPECTED,
    RECEIVED,
    Profile,
    SnapshotText,
    body,
    differs,
    has_further_ranks,
    read_snapshot,
    write_atomically,
)
from pytest_fsdp_comm.snapshots.failed_comparison import COMPARED, UNEXPLAINED
from pytest_fsdp_comm.snapshots.lines import REMEDY
from pytest_fsdp_comm.snapshots.names import PART, SUFFIX, basename, written_module
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import first_of, show_path
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import merge, tree_facts

if TYPE_CHECKING:
    from pytest_fsdp_comm.snapshots.differences import Difference

# Exchanges text among the ranks of a test.
Gather: TypeAlias = Callable[[str], list[str]]

UNWRITTEN: Final = pytest.StashKey["dict[str, AssertionResult]"]()
"""In a test's stash: the comparisons whose files an update writes, by path."""

BOUND: Final = pytest.StashKey["CommSnapshot"]()
"""In a test's stash: its ``comm_snapshot``, from the fixture's set-up to the end of the test."""

UNUSED: Final = (
    "comm_snapshot was requested but never compared, so this test passes whatever is sent:\n"
    "  compare it in the test or in a fixture (atexit is too late): "
    "assert comm_mode == comm_snapshot\n"
    "  or drop the fixture; call pytest.skip() where there is nothing to compare;\n"
    "  if only some tests of a fixture compare, let it call comm_snapshot(allow_unused=True)"
)

# What errors call a text that was just written.
_RECORDING: Final = "the recording"

# By kind of gap, the lines above and below those of a recording.
_REFUSED: Final = {
    "unseen": (
        "comm_mode lacks something that was sent, so nothing was compared or written:\n"
        "send it by torch.distributed, on a thread that no earlier block has started; or, to "
        "compare the rest, use comm_snapshot(allow_unseen=True)"
    ),
    "idle_model": (
        "comm_mode was given a model that did not run, so nothing was compared or written:\n"
        "give it the model that runs, as it is once wrapped; if this one rightly does not run, use "
        "comm_snapshot(allow_idle_model=True)"
    ),
    "value_dependent": (
        "the fake group exchanges no values, so what depends on them may be recorded wrongly, and "
        "nothing was compared or written:\n"
        'run the test with backend="gloo", or let fixed numbers decide; if these values decide '
        "nothing that is sent, use comm_snapshot(allow_value_dependent=True)"
    ),
}
# With the lines above and below, 8 at most, after which pytest cuts.
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """One comparison: what a call of the assertion changes, and then what is compared."""

    name: str = ""
    """The name of its file; empty for none."""
    allowed: frozenset[str] = frozenset()
    """Kinds of gaps that a recording may have, and ``empty`` for a value without any content."""
    activation_nbytes: bool = True
    value: object = None
    location: str = ""


class CommSnapshotExtension(SingleFileSnapshotExtension):
    """One file for each assertion; `bind_extension` gives its instance what syrupy does not."""

    _write_mode = WriteMode.TEXT
    file_extension = SUFFIX.removeprefix(".")

    def __init__(self, item: pytest.Item, gather: Gather | None) -> None:
        """Read from a test what its comparisons depend on; `gather` is None for one process."""
        super().__init__()
        settings = item.stash.get(SETTINGS, None)
        self._ranks: tuple[int, ...] = settings.ranks if settings else ()
        self._world_size = settings.world_size if settings else 1
        self._gather = gather or (lambda text: [text])
        self._updates = bool(item.config.option.update_snapshots)
        self._options = item.config.stash[OPTIONS]
        self._rootdir = item.config.rootpath
        # By file: an update must not overwrite what the same test has just written.
        self._updated: dict[str, str] = {}

    def serialize(self, data: _Comparison, **_: Any) -> SnapshotText:
        """Merge what the ranks have and write it as text; refuse what is empty or incomplete."""
        profile = self._profile(data)
        if isinstance(profile, CommProfile):
            check_completeness(profile, allowed=data.allowed)
            if not data.activation_nbytes:
                profile = without_activation_sizes(profile)
        try:
            text = SnapshotText.of(profile, where=_RECORDING)
            if self._updates:
                # What is written has to be readable.
                profile = SnapshotText(str(text), where=_RECORDING).profile
        except SnapshotFormatError as problem:
            raise FsdpCommError(
                f"{str(problem).removesuffix(REMEDY)}It is too large for a snapshot: compare "
                "a part of the model, or fewer ranks"
            ) from None
        if self._updates and body(self._updated.setdefault(data.location, text)) != body(text):
            raise FsdpCommError(
                f"{self._shown(data.location)} is compared twice in this test with different "
                "recordings, and an update cannot write both; give each its own name: "
                'comm_snapshot(name="second")'
            )
        return text

    def _profile(self, data: _Comparison) -> Profile:
        value, allow_empty = data.value, "empty" in data.allowed
        if hasattr(value, "merged_profile"):
            profile: CommProfile = value.merged_profile()
            if not (profile.collectives or allow_empty or self._had_collectives(data.location)):
                raise EmptyRecordingError(
                    "the recording has no collectives, so a snapshot of it would guard nothing: is "
                    "the model sharded, and does it run inside `with comm_mode(model):`? If the "
                    "test expects that nothing is sent, use comm_snapshot(allow_empty=True)"
                )
            return profile
        if isinstance(value, ShardTree):
            if not value.is_distributed and not allow_empty:
                raise EmptyRecordingError(
                    "the tree has no unit and no DTensor, so a snapshot of it would guard nothing: "
                    "is fully_shard(model), or DistributedDataParallel(model), missing? If the "
                    "test expects a plain model, use comm_snapshot(allow_empty=True)"
                )
            trees = gather_alike(self._gather, "fsdp_tree", tree_facts(value))
            return merge(
                dict(zip(self._ranks or range(len(trees)), trees, strict=True)),
                backend=value.backend,
                torch_version=value.torch_version,
            )
        shown = type(value).__name__
        if isinstance(value, Mapping):
            shown = f"a dict with the keys {list(value)!r:.80}" if value else "an empty dict"
        raise FsdpCommError(
            "comm_snapshot compares comm_mode, fsdp_tree(model), or a dict of these by name "
            'such as {"comm": comm_mode, "tree": fsdp_tree(model)}, got '
            f"{shown}; for other values use syrupy's plain `snapshot` fixture"
        )

    def _had_collectives(self, location: str) -> bool:
        """Whether a comparison can report what is no longer sent, which an update refuses."""
        reviewed = read_snapshot(Path(location), where=self._shown(location))
        profile = reviewed.profile if reviewed and not self._updates else None
        return isinstance(profile, CommProfile) and bool(profile.collectives)

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Compare what counts; exactly when updating, so that an update also refreshes a file."""
        old: SnapshotText = snapshot_data
        if body(serialized_data) == body(old):
            return True
        # Whatever follows, a file that is broken is neither overwritten nor compared.
        reviewed = old.profile
        is_partial = len(self._ranks) not in {0, self._world_size}
        # An update writes whatever differs.
        if self._updates and not is_partial:
            return False
        # What was replayed is plain text (see Note [Replay]).
        new = serialized_data
        if not isinstance(new, SnapshotText):
            new = SnapshotText(new, where=_RECORDING)
        is_same = not differs(old, new)
        if self._updates and not is_same and has_further_ranks(reviewed, new.profile):
            whole = name_ranks(reviewed.recorded_ranks) if reviewed.recorded_ranks else "all ranks"
            raise FsdpCommError(
                f"{old.lines.where} was recorded on {whole} and differs from what this update "
                f"recorded on {name_ranks(self._ranks)} of {self._world_size} alone; a recording "
                "never replaces one of further ranks. Nothing was overwritten: update with all of "
                "these (every rank: gloo or nccl, without --comm-backend fake), or delete the file "
                "to keep only the ranks of this update from now on"
            )
        return is_same

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> SnapshotText | None:
        """Read a file; refuse a broken one even when updating, so that nothing is lost silently."""
        del snapshot_name, session_id
        path = Path(snapshot_location)
        return read_snapshot(path, where=self._shown(snapshot_location))

    def _shown(self, location: str) -> str:
        return show_path(Path(location), self._rootdir)

    @classmethod
    def write_snapshot(cls, **_: Any) -> None:
        """Write nothing: `replay.settle_updates` does, once the test has passed."""

    # Where files are.

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """``<root>/<path of the test module without .py>``."""
        config = test_location.item.config
        module = written_module(Path(test_location.filepath), config.rootpath)
        return str(config.stash[OPTIONS].snapshot_dir / module)

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: Any) -> str:
        """``<test name>.<variant>[.<name or index>]``."""
        item = test_location.item
        return basename(snapshot_test_name(item), snapshot_variant(item), index)

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: Any = 0) -> str:
        """Begin with the test's name, by which syrupy relates the two."""
        file = cls.get_file_basename(test_location=test_location, index=index)
        return f"{test_location.snapshot_name}[{file}]"

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        """`dirname` and `get_file_basename` decide; syrupy's own guess does not know them."""
        return True

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Find none: syrupy must not count them as unused, which `unused` decides."""
        return SnapshotCollections()

    def keep_artifacts(self, location: str, *, received: str | None, expected: str | None) -> None:
        """Keep for ``--comm-artifacts`` what a comparison was about; None removes a file."""
        if (directory := self._options.artifacts_dir) is None:
            return
        try:
            # Where the received file is, the other one is complete.
            for side, text in ((EXPECTED, expected), (RECEIVED, received)):
                path = directory / side / Path(location).relative_to(self._options.snapshot_dir)
                if text is None:
                    path.unlink(missing_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, text)
        except OSError as problem:
            # The difference is shown all the same.
            warnings.warn(
                f"--comm-artifacts: cannot keep what differs ({problem}), so that it cannot be "
                "accepted from there",
                pytest.PytestWarning,
                stacklevel=1,
            )

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """The lines that differ, below the explanation; the first line is not compared."""
        yield from super().diff_lines(body(serialized_data), body(snapshot_data))


def check_completeness(profile: CommProfile, *, allowed: AbstractSet[str] = frozenset()) -> None:
    """Refuse a profile with gaps of kinds that are not allowed."""
    for kind, text in _REFUSED.items():
        gaps = [gap for gap in profile.gaps if gap.kind == kind]
        if not gaps or kind in allowed:
            continue
        before, after = text.split("\n")
        lines = [
            f"  {gap.text}" + f" (on {name_ranks(gap.ranks)})" * bool(gap.ranks) for gap in gaps
        ]
        shown, left = first_of(lines, _SHOWN)
        more = [f"  and {left} more"] * bool(left)
        raise IncompleteRecordingError("\n".join((before, *shown, *more, after)))


def bind_extension(item: pytest.Item, gather: Gather | None = None) -> type[CommSnapshotExtension]:
    """What an assertion makes its extension from; without `gather`, for one process."""
    # syrupy calls it without arguments when the assertion first needs the extension; all that it
    # requires is that it can be called.
    return cast("type[CommSnapshotExtension]", partial(CommSnapshotExtension, item, gather))


class CommSnapshot(SnapshotAssertion):
    """syrupy's assertion, with switches of its own, and with several values by name."""

    def __post_init__(self) -> None:
        self.last_results: tuple[tuple[str, AssertionResult], ...] = ()
        """What came of the last comparison, by the values' names; ``""`` for one without."""
        self.allows_unused = False
        self.explains = True
        """Whether this rank says why a comparison failed; the others only that it did."""
        self.differences: dict[str, Difference] = {}
        """Why values of the last comparison differ, by name, once that was asked."""
        self.compared_at = ""
        """Where the first comparison that failed was made, as ``path:line``."""
        self._comparisons = 0
        self._changes = _Comparison()
        self._index: str | int = 0
        super().__post_init__()

    def __call__(  # noqa: PLR0913  # each is a switch of its own
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
        """Change the next comparison.

        Args:
            allow_empty: Accept a recording without a collective, or a tree without a sharded
                parameter.
            allow_value_dependent: Accept a recording of the fake group although code that ran in it
                reads values of tensors, which may be wrong there.
            allow_idle_model: Accept a recording of ``comm_mode(model)`` in which no module of the
                model ran, while those of another sent something.
            allow_unseen: Accept a recording that is known to lack something that was sent.
            allow_unused: Accept a test that compares nothing.
            activation_nbytes: Whether to compare how large activations are. Without, the snapshot
                says so, and their number, kind, axis and element type are compared still.
            changes: As for syrupy's ``snapshot``; ``name`` gives the assertion a file of its own.
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
        """What distinguishes this comparison's file from the test's others (see `basename`)."""
        # syrupy reads it several times in a comparison, and counts values, not comparisons.
        return self._index

    def __eq__(self, other: object) -> bool:
        """Compare one value, or each of a dict: all of them, whatever comes of the first.

        ``{"comm": comm_mode, "tree": fsdp_tree(model)}`` has the files of
        ``comm_mode == comm_snapshot`` and ``fsdp_tree(model) == comm_snapshot(name="tree")``.
        """
        __tracebackhide__ = True
        if BOUND not in self.test_location.item.stash:
            raise FsdpCommError(
                f"comm_snapshot was compared after {self.test_location.testname} had ended, as by "
                "atexit or in another test, where a difference fails nothing: compare it in the "
                "test, or in one of its fixtures"
            )
        # `serialize` refuses an empty dict, and one whose keys cannot be names.
        values: Mapping[str, object] = {"": other}
        if isinstance(other, Mapping) and all(
            isinstance(key, str) and key and PART not in key for key in other
        ):
            values = other or values
        self.differences = {}
        try:
            self.last_results = tuple(
                (key, self._compare(key, value)) for key, value in values.items()
            )
            item = self.test_location.item
            observer = item.config.stash.get(OBSERVER, None)
            if observer is not None:
                observer.note_comparison(self, values)
            is_same = all(result.success for _, result in self.last_results)
            if not is_same and UNEXPLAINED not in item.stash:
                self.compared_at = find_call_site()
                # The next comparison replaces the results.
                item.stash[UNEXPLAINED] = copy.copy(self)
            return is_same
        finally:
            self._comparisons += 1
            self._changes = _Comparison()

    def __ne__(self, other: object) -> bool:
        __tracebackhide__ = True
        raise FsdpCommError(
            "comm_snapshot was compared with !=, which would pass for any other recording and "
            "cannot be recorded: assert comm_mode == comm_snapshot, or, to check that something "
            "is sent, ask comm_mode.counts(...)"
        )

    def _compare(self, key: str, value: object) -> AssertionResult:
        first = self._changes.name or (str(self._comparisons) if self._comparisons else "")
        # The file of the value called "comm" is named as that of a single value.
        self._index = PART.join(filter(None, (first, "" if key == "comm" else key))) or 0
        location = self.extension.get_location(test_location=self.test_location, index=self._index)
        super().__eq__(replace(self._changes, value=value, location=location))
        item = self.test_location.item
        item.stash[COMPARED][show_path(location, item.config.rootpath)] = None
        result = self.executions[self.num_executions - 1]
        note_update(item, result)
        if result.success:
            # Those of an earlier run would bring its state back.
            self.extension.keep_artifacts(location, received=None, expected=None)
        return result

    def __repr__(self) -> str:
        """Short, since pytest shows it beside every failure."""
        return f"<CommSnapshot of {self.test_location.testname}>"

    __hash__ = None  # type: ignore[assignment]  # as in syrupy: comparing has effects


def note_update(item: pytest.Item, result: AssertionResult) -> None:
    """Note what an update is to write for a test, once it has passed."""
    if result.created or result.updated:
        item.stash.setdefault(UNWRITTEN, {})[result.snapshot_location] = result


def bind_snapshot(
    snapshot: SnapshotAssertion, item: pytest.Item, gather: Gather | None, *, explains: bool = True
) -> CommSnapshot:
    """Make an assertion for ``comm_mode`` and ``fsdp_tree(model)``, with syrupy's options."""
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
    """End a test's comparisons; return whether it should have made one, if it passes."""
    snapshot = item.stash.get(BOUND, None)
    if snapshot is None:
        return False
    del item.stash[BOUND]
    is_called = not item.config.getoption("setuponly", default=False)
    return is_called and not (snapshot.allows_unused or item.stash[COMPARED])
