"""Snapshots through syrupy: where they are, what they hold, how they are compared and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeGuard, cast

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.data import SnapshotCollection, SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.errors import EmptyRecordingError, FsdpCommError, SnapshotFormatError
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.snapshots.comm_text import format_profile, parse_profile
from pytest_fsdp_comm.snapshots.files import (
    check_snapshot,
    read_snapshot,
    shown_path,
    write_atomically,
)
from pytest_fsdp_comm.snapshots.lines import REMEDY, read_header
from pytest_fsdp_comm.snapshots.names import PART, SUFFIX, basename, written_module
from pytest_fsdp_comm.snapshots.tree_text import format_tree, merge_tree_texts, parse_tree_ranks
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.tree.model import ShardTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syrupy.assertion import AssertionResult
    from syrupy.location import PyTestLocation

    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.tree.facts import TreeFacts

UNNAMED: Final = "comm"
"""The name, in a dict of values, of the one whose file has none."""

# A file says by which ranks it was recorded only so far: by its backend, of which `fake` alone runs
# a part of them, and by the ranks of its lines.
_WRITTEN_BY: Final = re.compile(r"[^\n]*, (\w+) \(not compared\)\n")

_BOUND: Final = pytest.StashKey[dict[str, type["CommSnapshotExtension"]]]()


class CommSnapshotExtension(SingleFileSnapshotExtension):
    """One file for each assertion, below a directory that mirrors the tests.

    syrupy makes instances without arguments, so what an assertion needs is bound to subclasses, one
    for each variant of a session: see `bound_extension`.
    """

    _write_mode = WriteMode.TEXT
    file_extension = SUFFIX.removeprefix(".")

    root: ClassVar[Path]
    """Directory of all snapshots."""
    anchor: ClassVar[Path]
    """As `options.SessionOptions.snapshot_anchor`."""
    rootdir: ClassVar[Path]
    """pytest's root directory."""
    variant: ClassVar[str]
    """``ws4``; empty for a test that is not distributed."""
    updates: ClassVar[bool]
    """Whether ``--snapshot-update`` is given."""
    artifacts: ClassVar[Path | None]
    """Directory for what failed comparisons received; None keeps nothing."""

    def __init__(self) -> None:
        """Starts without an exchange; `bind_snapshot` gives one."""
        super().__init__()
        self.allows_empty = False
        self.recorded_ranks: tuple[int, ...] = ()
        self.world_size = 1
        self.where = ""
        # What this test has written or compared, by file: an update must not overwrite its own.
        self._updated: dict[str, str] = {}
        self.gather: Callable[[str], list[str]] = lambda text: [text]
        # What was serialized, by its text: with details that the text does not hold.
        self._profiles: dict[str, CommProfile] = {}

    def bind_ranks(self, item: pytest.Item) -> None:
        """Takes from a test which ranks of it are recorded."""
        settings = item.stash.get(SETTINGS, None)
        if settings is not None:
            self.recorded_ranks = settings.ranks
            self.world_size = settings.world_size

    def serialize(self, data: Any, **_: Any) -> str:
        """Merges what the ranks have and writes it as text.

        Args:
            data: The value of ``comm_mode`` or of ``fsdp_tree(model)``.

        Raises:
            EmptyRecordingError: There is nothing that a later change could differ from.
            FsdpCommError: It is something else.
        """
        if hasattr(data, "merged_profile"):
            text = self._serialize_profile(data.merged_profile())
        elif isinstance(data, ShardTree):
            text = self._serialize_tree(data)
        else:
            raise FsdpCommError(
                "comm_snapshot compares comm_mode, fsdp_tree(model), or a dict of these by name "
                'such as {"comm": comm_mode, "tree": fsdp_tree(model)}, got '
                f"{_shown_type(data)}; for other values use syrupy's plain `snapshot` fixture"
            )
        if self.updates and _body(self._updated.setdefault(self.where, text)) != _body(text):
            raise FsdpCommError(
                f"{self.where} is compared twice in this test, with different recordings, so that "
                "an update cannot write both; give each a name of its own: "
                'comm_snapshot(name="second")'
            )
        return text

    def _serialize_profile(self, profile: CommProfile) -> str:
        if profile.is_empty and not self.allows_empty:
            raise EmptyRecordingError(
                "the recording has not one collective, so that a snapshot of it could never fail: "
                "is the model sharded, and does it run inside `with comm_mode(model):`? A test "
                "whose point is that nothing is sent says comm_snapshot(allow_empty=True)"
            )
        text = _readable(format_profile(profile))
        self._profiles[text] = profile
        return text

    def _serialize_tree(self, tree: ShardTree) -> str:
        if not tree.is_sharded and not self.allows_empty:
            raise EmptyRecordingError(
                "the tree has not one sharded parameter, so that a snapshot of it would guard "
                "nothing: is fully_shard(model) missing? A test whose point is that nothing is "
                "sharded says comm_snapshot(allow_empty=True)"
            )
        texts = gather_alike(self.gather, "fsdp_tree", format_tree(tree))
        ranks = self.recorded_ranks or range(len(texts))
        return _readable(merge_tree_texts(dict(zip(ranks, texts, strict=True))))

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Compares what counts; exactly when updating, so that an update also refreshes a file."""
        # The first line names versions: a change of it alone is no difference.
        if _body(serialized_data) == _body(snapshot_data):
            return True
        is_part = len(self.recorded_ranks) not in {0, self.world_size}
        # An update writes what differs in any way.
        if self.updates and not is_part:
            return False
        is_same = not self._differs(snapshot_data, serialized_data, is_part=is_part)
        if self.updates and not is_same:
            self._refuse_part(snapshot_data)
        return is_same

    def _differs(self, old: str, new: str, *, is_part: bool) -> bool:
        kind = read_header(old, where=self.where)
        if kind != read_header(new, where="the recording"):
            return True
        if kind == "comm":
            return bool(compare(parse_profile(old), self.profile_of(new)).changes)
        # Of all ranks, equal trees have equal texts.
        return not is_part or any(
            _tree_of(rank, old) != _tree_of(rank, new) for rank in self.recorded_ranks
        )

    def _refuse_part(self, old: str) -> None:
        """Raises unless these ranks' update loses nothing of others."""
        told = _ranks_told(old)
        backend = _WRITTEN_BY.match(old)
        is_fake = backend is not None and backend[1] == "fake"
        if is_fake and told <= set(self.recorded_ranks):
            return
        whole = name_ranks(sorted(told)) if is_fake else "all ranks"
        raise FsdpCommError(
            f"{self.where} was recorded on {whole}, and differs from what this update recorded on "
            f"{name_ranks(self.recorded_ranks)} of {self.world_size} alone; a part never replaces "
            "the whole. Nothing was overwritten: update with every rank (gloo or nccl, without "
            "--comm-backend fake), or delete the file to keep only this part of it from now on"
        )

    def profile_of(self, text: str) -> CommProfile:
        """The profile behind a serialized text, with sites and notes if it was recorded here."""
        known = self._profiles.get(text)
        return known or replace(parse_profile(text), recorded_ranks=self.recorded_ranks)

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Reads a file of either kind and checks all of it.

        Raises:
            SnapshotFormatError: It is not; when updating, too, so that nothing is lost unseen.
        """
        del snapshot_name, session_id
        path = Path(snapshot_location)
        return read_snapshot(path, where=self._shown(path))

    def _shown(self, path: Path) -> str:
        return shown_path(path, self.rootdir)

    @classmethod
    def write_snapshot_collection(
        cls, *, snapshot_collection: SnapshotCollection, name_order: Any = None
    ) -> None:
        """Writes a file all at once: an interrupted update leaves the old file whole.

        Raises:
            OSError: The directory cannot be made or written; `describe_error` makes it readable.
        """
        del name_order
        path = Path(snapshot_collection.location)
        for snapshot in snapshot_collection:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, str(snapshot.data))

    def delete_snapshots(self, *, snapshot_location: str, snapshot_names: set[str]) -> None:
        """Never: `unused` decides which files go."""
        raise AssertionError(snapshot_location, snapshot_names)

    # Where files are.

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """``<root>/<path of the test module without .py>``."""
        return str(cls.root / written_module(Path(test_location.filepath), cls.anchor))

    @classmethod
    def discovery_dirname(cls, *, test_location: PyTestLocation) -> str:
        """Where `discover_snapshots` would look."""
        return cls.dirname(test_location=test_location)

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: Any) -> str:
        """``<test name>.<variant>[.<name or index>]``."""
        return basename(snapshot_test_name(test_location.item), cls.variant, index)

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: Any = 0) -> str:
        """Begins with the test's name, by which syrupy relates the two."""
        file = cls.get_file_basename(test_location=test_location, index=index)
        return f"{test_location.snapshot_name}[{file}]"

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        """`dirname` and `get_file_basename` decide; syrupy's own guess does not know them."""
        return True

    def discover_snapshots(
        self, *, test_location: PyTestLocation, ignore_extensions: list[str] | None = None
    ) -> SnapshotCollections:
        """None: what syrupy does not know of, it cannot take for unused (see `unused_plugin`)."""
        del test_location, ignore_extensions
        return SnapshotCollections()

    def read_snapshot_collection(self, *, snapshot_location: str) -> SnapshotCollection:
        """Never, as none is discovered."""
        raise AssertionError(snapshot_location)

    def received_path(self, location: str) -> Path | None:
        """Where ``--comm-artifacts`` keeps what is to replace a snapshot file."""
        return (
            None
            if self.artifacts is None
            else self.artifacts / Path(location).relative_to(self.root)
        )

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """The lines that differ, below the explanation; the first line is not compared."""
        yield from super().diff_lines(_body(serialized_data), _body(snapshot_data))


def _readable(text: str) -> str:
    """The text, unless it is beyond what a snapshot may hold, so that it could not be read back."""
    try:
        check_snapshot(text, where="the recording")
    except SnapshotFormatError as problem:
        raise FsdpCommError(
            f"{str(problem).removesuffix(REMEDY)}It is too much to become a snapshot: compare a "
            "part of the model, or fewer ranks"
        ) from None
    return text


def _tree_of(rank: int, text: str) -> TreeFacts | None:
    trees = parse_tree_ranks(text)
    return next((tree for ranks, tree in trees.items() if not ranks or rank in ranks), None)


def _ranks_told(text: str) -> set[int]:
    """The ranks that a snapshot tells apart."""
    if read_header(text, where="the snapshot") == "tree":
        return set(chain(*parse_tree_ranks(text)))
    profile = parse_profile(text)
    sections = (profile.rows, profile.reshards, profile.redistributions)
    return {rank for rows in sections for row in rows for rank in row.ranks}


def _are_named(value: object) -> TypeGuard[Mapping[str, object]]:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and key and PART not in key for key in value)
    )


def _shown_type(value: object) -> str:
    if not isinstance(value, Mapping):
        return type(value).__name__
    return "an empty dict" if not value else f"a dict with the keys {list(value)!r:.80}"


def _body(text: str) -> str:
    return text.partition("\n")[2]


def bound_extension(config: pytest.Config, variant: str) -> type[CommSnapshotExtension]:
    """The extension for a variant, one class a session: syrupy tells extensions apart by class."""
    classes = config.stash.setdefault(_BOUND, {})
    if variant not in classes:
        classes[variant] = type(
            CommSnapshotExtension.__name__,
            (CommSnapshotExtension,),
            {
                "__module__": CommSnapshotExtension.__module__,
                "__qualname__": CommSnapshotExtension.__qualname__,
                "root": config.stash[OPTIONS].snapshot_dir,
                "anchor": config.stash[OPTIONS].snapshot_anchor,
                "rootdir": config.rootpath,
                "variant": variant,
                "updates": bool(config.option.update_snapshots),
                "artifacts": config.stash[OPTIONS].artifacts_dir,
            },
        )
    return classes[variant]


class CommSnapshot(SnapshotAssertion):
    """syrupy's assertion, which also takes ``allow_empty``, and several values by name."""

    _comparisons = 0
    _name = ""
    _index: str | int = 0
    last_results: tuple[tuple[str, AssertionResult], ...] = ()
    """What came of the last comparison, by the values' names; ``""`` for one without."""

    def __call__(self, *, allow_empty: bool = False, **changes: Any) -> Self:
        """Changes the next comparison.

        Args:
            allow_empty: Accept a recording without a collective, or a tree without a sharded
                parameter.
            changes: As for syrupy's ``snapshot``; ``name`` gives the assertion a file of its own.
        """
        super().__call__(**changes)
        self._name = str(changes.get("name") or "")
        if allow_empty:
            cast("CommSnapshotExtension", self.extension).allows_empty = True
        return self

    @property
    def index(self) -> str | int:
        """What tells the file of this comparison from the test's others (see `basename`)."""
        return self._index

    def __eq__(self, other: object) -> bool:
        """Compares one value, or each of a dict: all of them, whatever comes of the first.

        ``{"comm": comm_mode, "tree": fsdp_tree(model)}`` has the files of
        ``comm_mode == comm_snapshot`` and ``fsdp_tree(model) == comm_snapshot(name="tree")``.
        """
        prefix = self._name or (str(self._comparisons) if self._comparisons else "")
        # An empty dict, or one with odd keys, is no comparison: `serialize` says so.
        values: Mapping[str, object] = other if _are_named(other) else {"": other}
        try:
            self.last_results = tuple(
                (key, self._compare(value, key, prefix)) for key, value in values.items()
            )
            return all(result.success for _, result in self.last_results)
        finally:
            self._comparisons += 1
            self._name = ""
            cast("CommSnapshotExtension", self.extension).allows_empty = False

    def _compare(self, value: object, key: str, prefix: str) -> AssertionResult:
        parts = [part for part in (prefix, "" if key == UNNAMED else key) if part]
        self._index = PART.join(parts) or 0
        extension = cast("CommSnapshotExtension", self.extension)
        extension.where = shown_path(
            Path(extension.get_location(test_location=self.test_location, index=self._index)),
            extension.rootdir,
        )
        super().__eq__(value)
        result = self.executions[self.num_executions - 1]
        received = extension.received_path(result.snapshot_location)
        if result.success and received is not None:
            # Of an earlier run into the same directory: copied over, it would bring that back.
            received.unlink(missing_ok=True)
        return result

    def __repr__(self) -> str:
        """Short, since pytest shows it beside every failure."""
        return f"<comm_snapshot of {self.test_location.testname}>"

    __hash__ = None  # type: ignore[assignment]  # as in syrupy: comparing has effects


def bind_snapshot(
    snapshot: SnapshotAssertion, item: pytest.Item, gather: Callable[[str], list[str]] | None
) -> CommSnapshot:
    """Makes an assertion that compares communication.

    Args:
        snapshot: The value of syrupy's fixture, whose options it takes.
        item: The test.
        gather: Exchange between the ranks of the test; None in one process.

    Returns:
        The assertion to compare ``comm_mode`` and ``fsdp_tree(model)`` with.
    """
    assertion = CommSnapshot(
        session=snapshot.session,
        extension_class=bound_extension(item.config, snapshot_variant(item)),
        test_location=snapshot.test_location,
        update_snapshots=snapshot.update_snapshots,
        update_new_snapshots_only=snapshot.update_new_snapshots_only,
    )
    extension = cast("CommSnapshotExtension", assertion.extension)
    extension.bind_ranks(item)
    if gather is not None:
        extension.gather = gather
    return assertion
