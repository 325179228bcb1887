"""Ranks read snapshots and never write them: the parent asserts again what rank 0 asserted."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.base import AbstractSyrupyExtension
from syrupy.location import PyTestLocation

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import write_atomically
from pytest_fsdp_comm.snapshots.extension import (
    UNUSED,
    UNWRITTEN,
    CommSnapshotExtension,
    bind_extension,
    end_comparisons,
    note_update,
)
from pytest_fsdp_comm.text.words import show_path

# Note [Replay]: syrupy decides in one process what is written, counted and removed. So in a rank
# its session is read-only, and notes the extension and index of each assertion; the serialized
# values travel to the pytest process, which asserts them once more on the real session. Private
# names of syrupy 7.0 are used here and nowhere else: ``config._syrupy``,
# ``SnapshotSession._assertions`` and ``_worker_reports``, and ``SnapshotAssertion._executions``;
# tests/unit/snapshots/test_replay.py fails when one moves.

_USE: Final = "snapshots in ranks rely on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssertion:
    """One snapshot assertion of a rank."""

    module: str
    """The module of its extension's class."""
    qualname: str
    index: int | str
    """The assertion's number in the test, or its name."""
    data: str
    """What was asserted, serialized; a character for each byte if it is bytes."""
    is_bytes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssertions:
    """The snapshot assertions that a test made in one rank, in order."""

    assertions: tuple[RankAssertion, ...]
    is_unused: bool
    """Whether the test had ``comm_snapshot`` and compared nothing with it."""


class RankSnapshots:
    """Carries a test's snapshot assertions from rank 0 to the pytest process."""

    payload_type: Final = RankAssertions

    def __init__(self) -> None:
        """Begin before the first test."""
        # The extension and index of each snapshot that syrupy looked up, by file and name.
        self._recalls: dict[tuple[str, str], tuple[type, int | str]] = {}

    def enter_rank(self, config: pytest.Config) -> None:
        """Make the session in a rank read-only, and note what syrupy recalls."""
        session = _session(config)
        config.pluginmanager.unregister(name="fsdp-comm-unused")
        recall = session.recall_snapshot

        def recall_and_note(extension: Any, test_location: Any, index: Any) -> Any:
            location = extension.get_location(test_location=test_location, index=index)
            name = extension.get_snapshot_name(test_location=test_location, index=index)
            self._recalls[location, name] = (type(extension), index)
            return recall(extension, test_location, index)

        session.recall_snapshot = recall_and_note
        session.queue_snapshot_write = lambda **_: None

    def rank_payload(self, item: pytest.Item) -> RankAssertions:
        """The assertions that the test made in this rank."""
        session = _session(item.config)
        made = []
        for assertion in _get(session, "_assertions"):
            for _, result in sorted(assertion.executions.items()):
                recall = self._recalls.get((result.snapshot_location, result.snapshot_name))
                data: Any = result.asserted_data
                if recall is None or data is None:
                    continue
                extension, index = recall
                is_bytes = isinstance(data, bytes)
                made.append(
                    RankAssertion(
                        module=extension.__module__,
                        qualname=extension.__qualname__,
                        index=index,
                        data=data.decode("latin-1") if is_bytes else str(data),
                        is_bytes=is_bytes,
                    )
                )
        # A rank that runs several tests begins each with none.
        _get(session, "_assertions").clear()
        self._recalls.clear()
        return RankAssertions(assertions=tuple(made), is_unused=end_comparisons(item))

    def merge(
        self,
        item: pytest.Item,
        payloads: Mapping[int, RankAssertions],
        *,
        has_failed: bool,
        has_passed: bool,
    ) -> list[str]:
        """Assert again what the lowest rank did; return why it fails, unless the ranks failed."""
        # Nothing is updated that does not belong to a test that passed on all ranks.
        if not payloads or (item.config.option.update_snapshots and not has_passed):
            return []
        failures = [_assert_again(item, made) for made in payloads[min(payloads)].assertions]
        problems = [] if has_failed else [failure for failure in failures if failure]
        if has_passed and any(made.is_unused for made in payloads.values()):
            problems.append(UNUSED)
        return problems + settle_updates(item, has_passed=has_passed and not problems)


def compared_files(config: pytest.Config) -> list[str]:
    """The snapshot files that this process's assertions compared or wrote."""
    return sorted(
        {
            result.snapshot_location
            for assertion in _get(_session(config), "_assertions")
            for result in assertion.executions.values()
        }
    )


def end_test(item: pytest.Item, *, has_passed: bool) -> list[str]:
    """End a test without ranks: `settle_updates`, and report a snapshot that was not compared."""
    problems = settle_updates(item, has_passed=has_passed)
    return [*problems, UNUSED] if end_comparisons(item) and has_passed else problems


def settle_updates(item: pytest.Item, *, has_passed: bool) -> list[str]:
    """Write what a test recorded if it has passed; return why something cannot be written."""
    problems = []
    for location, result in item.stash.get(UNWRITTEN, {}).items():
        if has_passed:
            path = Path(location)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, str(result.asserted_data))
                continue
            except OSError as error:
                problems.append(
                    f"cannot write the snapshot {show_path(path, item.config.rootpath)} "
                    f"({error.strerror or error}); the old one, if any, is unchanged. Make the "
                    "directory writable, or choose another with ini fsdp_comm_snapshot_dir"
                )
        # So that syrupy does not count it among the files that it wrote.
        result.created = result.updated = result.success = False
    item.stash[UNWRITTEN] = {}
    return problems


def keep_plain_snapshots(config: pytest.Config, nodeids: Collection[str]) -> None:
    """Keep what plain ``snapshot`` assertions of tests that did not pass wrote."""
    # For syrupy 7.0 the snapshots of a test that failed early, or never ran, are unused, and
    # --snapshot-update deletes them; those of a skipped test are not. The session is that of
    # xdist's controller, or of the only process.
    session = _session(config)
    for nodeid in nodeids:
        session.ran_item(nodeid, "skipped")
    kept = set(nodeids)
    for report in _get(session, "_worker_reports"):
        for nodeid in kept.intersection(report["selected"]):
            report["selected"][nodeid] = "skipped"


def _assert_again(item: pytest.Item, made: RankAssertion) -> str:
    """Assert as a rank did; return why it failed, empty if it did not."""
    config = item.config
    assertion = SnapshotAssertion(
        session=_session(config),
        extension_class=_extension_class(item, made),
        test_location=PyTestLocation(item),
        update_snapshots=bool(config.option.update_snapshots),
        update_new_snapshots_only=bool(getattr(config.option, "update_new_snapshots_only", False)),
    )
    # Only this instance is changed, and not its class: syrupy tells extensions apart by class, and
    # writes together what is for one file of one class.
    assertion.extension.serialize = lambda data, **_: data  # type: ignore[method-assign]  # see above
    if isinstance(made.index, str):
        assertion(name=made.index)
    else:
        if not hasattr(assertion, "_executions"):
            raise upstream.moved_error("syrupy", "SnapshotAssertion._executions", _USE)
        assertion._executions = made.index
    is_same = assertion == (made.data.encode("latin-1") if made.is_bytes else made.data)
    result = assertion.executions[assertion.num_executions - 1]
    if isinstance(assertion.extension, CommSnapshotExtension):
        note_update(item, result)
    if is_same:
        return ""
    if result.exception is not None:
        return str(result.exception) or type(result.exception).__name__
    where = show_path(Path(result.snapshot_location), config.rootpath)
    return (
        f"a comparison with {where} failed and the test went on: it was caught, or its result not "
        "asserted (or the file changed while the test ran)"
    )


def _extension_class(item: pytest.Item, made: RankAssertion) -> type[AbstractSyrupyExtension]:
    found: Any = importlib.import_module(made.module)
    for name in made.qualname.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        raise FsdpCommError(
            f"the snapshot extension {made.module}.{made.qualname} cannot be imported by name, so "
            "the ranks' snapshots cannot be written; define it at module level"
        )
    if found is CommSnapshotExtension:
        return bind_extension(item)
    return cast("type[AbstractSyrupyExtension]", found)


def _session(config: pytest.Config) -> Any:
    if not config.pluginmanager.has_plugin("syrupy"):
        raise FsdpCommError(upstream.NEEDS_SYRUPY)
    session = getattr(config, "_syrupy", None)
    if session is None:
        raise upstream.moved_error("syrupy", "config._syrupy", _USE)
    return session


def _get(session: Any, name: str) -> Any:
    if not hasattr(session, name):
        raise upstream.moved_error("syrupy", f"SnapshotSession.{name}", _USE)
    return getattr(session, name)
