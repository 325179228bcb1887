"""Snapshots through syrupy: where they are, what they hold, how they are compared and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.data import Snapshot, SnapshotCollection, SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from pytest_fsdp_comm.diff import compare
from pytest_fsdp_comm.document import END, format_profile, parse_profile, read_header
from pytest_fsdp_comm.errors import EmptyRecordingError, FsdpCommError, SnapshotFormatError
from pytest_fsdp_comm.gathering import gather_alike
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.snapshot_files import shown_path, write_atomically
from pytest_fsdp_comm.snapshot_names import basename, is_of_variant, snapshot_name
from pytest_fsdp_comm.tree import ShardTree
from pytest_fsdp_comm.tree_text import format_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syrupy.location import PyTestLocation

    from pytest_fsdp_comm.profile import CommProfile

_BOUND: Final = pytest.StashKey[dict[str, type["CommSnapshotExtension"]]]()


class CommSnapshotExtension(SingleFileSnapshotExtension):
    """One file for each assertion, below a directory that mirrors the tests.

    syrupy makes instances without arguments, so what an assertion needs is bound to subclasses, one
    for each variant of a session: see `bound_extension`.
    """

    _write_mode = WriteMode.TEXT
    file_extension = "comm"

    root: ClassVar[Path]
    """Directory of all snapshots."""
    rootdir: ClassVar[Path]
    """pytest's root directory."""
    variant: ClassVar[str]
    """``ws4``; empty for a test that is not distributed."""
    updates: ClassVar[bool]
    """Whether ``--snapshot-update`` is given."""

    def __init__(self) -> None:
        """Starts without an exchange; `bind_snapshot` gives one."""
        super().__init__()
        self.allows_empty = False
        self.recorded_ranks: tuple[int, ...] = ()
        self.gather: Callable[[str], list[str]] = lambda text: [text]
        # What was serialized, by its text: with details that the text does not hold.
        self._profiles: dict[str, CommProfile] = {}

    def serialize(self, data: Any, **_: Any) -> str:
        """Merges what the ranks have and writes it as text.

        Args:
            data: The value of ``comm_mode`` or of ``fsdp_tree(model)``.

        Raises:
            EmptyRecordingError: There is nothing that a later change could differ from.
            FsdpCommError: It is something else.
        """
        if hasattr(data, "merged_profile"):
            return self._serialize_profile(data.merged_profile())
        if isinstance(data, ShardTree):
            return self._serialize_tree(data)
        raise FsdpCommError(
            "comm_snapshot compares comm_mode and fsdp_tree(model), got "
            f"{type(data).__name__}; for other values use syrupy's plain `snapshot` fixture"
        )

    def _serialize_profile(self, profile: CommProfile) -> str:
        if profile.is_empty and not self.allows_empty:
            raise EmptyRecordingError(
                "the recording has not one collective, so that a snapshot of it could never fail: "
                "is the model sharded, and does it run inside `with comm_mode(model):`? A test "
                "whose point is that nothing is sent says comm_snapshot(allow_empty=True)"
            )
        text = format_profile(profile)
        self._profiles[text] = profile
        return text

    def _serialize_tree(self, tree: ShardTree) -> str:
        if not tree.is_sharded and not self.allows_empty:
            raise EmptyRecordingError(
                "the tree has not one sharded parameter, so that a snapshot of it would guard "
                "nothing: is fully_shard(model) missing? A test whose point is that nothing is "
                "sharded says comm_snapshot(allow_empty=True)"
            )
        return _merge_tree_texts(gather_alike(self.gather, "fsdp_tree", format_tree(tree)))

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Compares what counts; exactly when updating, so that an update also refreshes a file."""
        # The first line names versions: a change of it alone is no difference.
        if _body(serialized_data) == _body(snapshot_data):
            return True
        kind = read_header(snapshot_data, where="the snapshot")
        if kind != "comm" or kind != read_header(serialized_data, where="the recording"):
            return False
        new = self.profile_of(serialized_data)
        is_part = len(new.recorded_ranks) not in {0, new.world_size}
        # An update writes what differs in any way, but not a part over the whole.
        if self.updates and not is_part:
            return False
        return not compare(parse_profile(snapshot_data), new).changes

    def profile_of(self, text: str) -> CommProfile:
        """The profile behind a serialized text, with sites and notes if it was recorded here."""
        known = self._profiles.get(text)
        return known or replace(parse_profile(text), recorded_ranks=self.recorded_ranks)

    def read_snapshot_data_from_location(
        self, *, snapshot_location: str, snapshot_name: str, session_id: str
    ) -> str | None:
        """Reads a file and checks that it is whole.

        Raises:
            SnapshotFormatError: It is not; when updating, too, so that nothing is lost unseen.
        """
        del snapshot_name, session_id
        path = Path(snapshot_location)
        try:
            text = path.read_bytes().decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise SnapshotFormatError(
                f"{self._shown(path)} cannot be read as UTF-8 text ({error}); restore it with `git "
                "checkout`, or delete it and record it anew with --snapshot-update"
            ) from None
        if read_header(text, where=self._shown(path)) == "comm":
            parse_profile(text, where=self._shown(path))
        return text

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
        """Deletes an obsolete file, and its directory if nothing else is in it."""
        del snapshot_names
        path = Path(snapshot_location)
        path.unlink()
        for parent in path.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    # Where files are.

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """``<root>/<path of the test module without .py>``."""
        module = Path(test_location.filepath)
        try:
            relative = module.relative_to(cls.rootdir)
        except ValueError:
            # A test outside the root directory, as with pytest -c elsewhere.
            relative = Path(module.name)
        return str(cls.root / relative.with_suffix(""))

    @classmethod
    def discovery_dirname(cls, *, test_location: PyTestLocation) -> str:
        """Obsolete files are looked for beside a module's other files."""
        return cls.dirname(test_location=test_location)

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: Any) -> str:
        """``<test name>.<variant>[.<name or index>]``."""
        return basename(test_location.snapshot_name, cls.variant, index)

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: Any = 0) -> str:
        """Begins with the test's name, as syrupy needs it to find the test of a file."""
        return snapshot_name(cls.get_file_basename(test_location=test_location, index=index))

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        """`dirname` and `get_file_basename` decide; syrupy's own guess does not know them."""
        return True

    def is_snapshot_location(self, *, location: str) -> bool:
        """Whether a file is of this variant: others belong to runs with other world sizes."""
        path = Path(location)
        return path.suffix == f".{self.file_extension}" and is_of_variant(path.stem, self.variant)

    def discover_snapshots(
        self, *, test_location: PyTestLocation, ignore_extensions: list[str] | None = None
    ) -> SnapshotCollections:
        """The files of this variant beside a test's own; foreign files are nobody's business."""
        del ignore_extensions
        found = SnapshotCollections()
        directory = Path(self.dirname(test_location=test_location))
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if path.is_file() and self.is_snapshot_location(location=str(path)):
                found.add(self.read_snapshot_collection(snapshot_location=str(path)))
        return found

    def read_snapshot_collection(self, *, snapshot_location: str) -> SnapshotCollection:
        """A file as syrupy's collection of one."""
        collection = SnapshotCollection(location=snapshot_location)
        collection.add(Snapshot(name=snapshot_name(Path(snapshot_location).stem)))
        return collection

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """The lines that differ, below the explanation; the first line is not compared."""
        yield from super().diff_lines(_body(serialized_data), _body(snapshot_data))


def _merge_tree_texts(texts: Sequence[str]) -> str:
    """One text if the ranks' trees are equal; otherwise each, below the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        groups.setdefault(text, []).append(place)
    if len(groups) == 1:
        return texts[0]
    lines = [texts[0].partition("\n")[0]]
    for text, places in groups.items():
        lines.append(f"ranks {','.join(map(str, places))}")
        lines += [f"  {line}" for line in _body(text).splitlines()]
    return "\n".join([*lines, END]) + "\n"


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
                "rootdir": config.rootpath,
                "variant": variant,
                "updates": bool(config.option.update_snapshots),
            },
        )
    return classes[variant]


class CommSnapshot(SnapshotAssertion):
    """syrupy's assertion, which also takes ``allow_empty``."""

    def __call__(self, *, allow_empty: bool = False, **changes: Any) -> Self:
        """Changes the next comparison.

        Args:
            allow_empty: Accept a recording without a collective, or a tree without a sharded
                parameter.
            changes: As for syrupy's ``snapshot``; ``name`` gives the assertion a file of its own.
        """
        super().__call__(**changes)
        if allow_empty:
            cast("CommSnapshotExtension", self.extension).allows_empty = True
        return self

    def __eq__(self, other: object) -> bool:
        """Compares, and forgets ``allow_empty`` again."""
        try:
            return bool(super().__eq__(other))
        finally:
            cast("CommSnapshotExtension", self.extension).allows_empty = False

    def __repr__(self) -> str:
        """Short, since pytest shows it beside every failure."""
        return f"<comm_snapshot of {self.test_location.testname}>"

    __hash__ = None  # type: ignore[assignment]  # as in syrupy: comparing has effects


def variant_of(item: pytest.Item) -> str:
    """``ws4``, the part of a file name that tells world sizes apart."""
    settings = item.stash.get(SETTINGS, None)
    return settings.variant if settings else "ws1"


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
        extension_class=bound_extension(item.config, variant_of(item)),
        test_location=snapshot.test_location,
        update_snapshots=snapshot.update_snapshots,
        update_new_snapshots_only=snapshot.update_new_snapshots_only,
    )
    if gather is not None:
        cast("CommSnapshotExtension", assertion.extension).gather = gather
    return assertion
