"""Repeat the lowest rank's snapshot assertions in the pytest process, which writes the files."""

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
from pytest_fsdp_comm.snapshots.extension import (
    UNUSED,
    UNWRITTEN,
    CommSnapshotExtension,
    bind_extension,
    end_comparisons,
    note_update,
)
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.text.words import show_path

# Note [Replay]: a single syrupy session must decide which files to write, count and remove.
# Therefore, the sessions in the ranks are read-only; they only record the extension and index of
# each assertion. Ranks send the serialized values to the pytest process, which repeats the
# assertions of the lowest rank.
# Only this module uses private names of syrupy 7.0: ``config._syrupy``,
# ``SnapshotSession._assertions`` and ``_worker_reports``, and ``SnapshotAssertion._executions``;
# tests/unit/snapshots/test_replay.py fails if one of them is renamed.

_USE: Final = "snapshots in ranks rely on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssertion:
    """A snapshot assertion that a rank made, with the class of its extension."""

    module: str
    qualname: str
    index: int | str
    """The assertion's number in the test, or its name."""
    data: str
    """The serialized value; if `is_bytes`, decoded as latin-1."""
    is_bytes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssertions:
    """The snapshot assertions that a test made in one rank, in order."""

    assertions: tuple[RankAssertion, ...]
    is_unused: bool
    """Whether the test requested ``comm_snapshot`` but never compared it."""


class RankSnapshots:
    """Collects a test's snapshot assertions in a rank, and repeats them in the pytest process."""

    payload_type: Final = RankAssertions

    def __init__(self) -> None:
        # Extension and index of each snapshot that syrupy read, keyed by file and snapshot name.
        self._recalls: dict[tuple[str, str], tuple[type, int | str]] = {}

    def enter_rank(self, config: pytest.Config) -> None:
        """Make syrupy's session in this rank read-only, and record which snapshots it reads."""
        session = _get_syrupy_session(config)
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
        """Return the assertions that the test made in this rank."""
        session = _get_syrupy_session(item.config)
        assertions = []
        for assertion in _get_session_attribute(session, "_assertions"):
            for _, result in sorted(assertion.executions.items()):
                recall = self._recalls.get((result.snapshot_location, result.snapshot_name))
                data: Any = result.asserted_data
                if recall is None or data is None:
                    continue
                extension, index = recall
                is_bytes = isinstance(data, bytes)
                assertions.append(
                    RankAssertion(
                        module=extension.__module__,
                        qualname=extension.__qualname__,
                        index=index,
                        data=data.decode("latin-1") if is_bytes else str(data),
                        is_bytes=is_bytes,
                    )
                )
        # Clear both, because the rank may run another test next.
        _get_session_attribute(session, "_assertions").clear()
        self._recalls.clear()
        return RankAssertions(assertions=tuple(assertions), is_unused=end_comparisons(item))

    def merge(
        self,
        item: pytest.Item,
        payloads: Mapping[int, RankAssertions],
        *,
        has_failed: bool,
        has_passed: bool,
    ) -> list[str]:
        """Repeat the lowest rank's assertions; return the problems that no rank has reported."""
        # Update only the snapshots of a test that passed on all ranks.
        if not payloads or (item.config.option.update_snapshots and not has_passed):
            return []
        failures = [
            _repeat_assertion(item, source) for source in payloads[min(payloads)].assertions
        ]
        problems = [] if has_failed else [failure for failure in failures if failure]
        if has_passed and any(payload.is_unused for payload in payloads.values()):
            problems.append(UNUSED)
        return problems + settle_updates(item, has_passed=has_passed and not problems)


def compared_files(config: pytest.Config) -> list[str]:
    """List the snapshot files that assertions in this process compared or wrote."""
    return sorted(
        {
            result.snapshot_location
            for assertion in _get_session_attribute(_get_syrupy_session(config), "_assertions")
            for result in assertion.executions.values()
        }
    )


def end_test(item: pytest.Item, *, has_passed: bool) -> list[str]:
    """End a test without ranks: write its updates, and return the problems that make it fail."""
    problems = settle_updates(item, has_passed=has_passed)
    return [*problems, UNUSED] if end_comparisons(item) and has_passed else problems


def settle_updates(item: pytest.Item, *, has_passed: bool) -> list[str]:
    """Write a test's updates if it has passed; return an error for each unwritable file."""
    problems = []
    unwritten = item.stash.get(UNWRITTEN, {})
    for location, result in [*unwritten.items()]:
        if has_passed:
            path = Path(location)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, str(result.asserted_data))
                del unwritten[location]  # at once, because the user may press Ctrl-C
                continue
            except OSError as error:
                problems.append(
                    f"cannot write the snapshot {show_path(path, item.config.rootpath)} "
                    f"({error.strerror or error}); an existing file is unchanged. Make the "
                    "directory writable, or set another with the ini option fsdp_comm_snapshot_dir"
                )
        # Keep syrupy from counting the file, because it was not written.
        result.created = result.updated = result.success = False
        del unwritten[location]
    return problems


def forget_unwritten(session: pytest.Session) -> None:
    """Keep syrupy from counting the files of a test that was interrupted before it could end."""
    unwritten = {location for item in session.items for location in item.stash.get(UNWRITTEN, {})}
    for assertion in _get_session_attribute(_get_syrupy_session(session.config), "_assertions"):
        for index, result in [*assertion.executions.items()]:
            if result.snapshot_location in unwritten:
                del assertion.executions[index]


def keep_plain_snapshots(config: pytest.Config, nodeids: Collection[str]) -> None:
    """Keep an update from deleting plain ``snapshot`` files of tests that did not pass."""
    # If a test failed early or never ran, syrupy 7.0 regards its snapshots as unused, and deletes
    # them with --snapshot-update. It never deletes a skipped test's snapshots, so mark all tests in
    # `nodeids` as skipped. Under xdist, this runs in the controller.
    session = _get_syrupy_session(config)
    for nodeid in nodeids:
        session.ran_item(nodeid, "skipped")
    skipped = set(nodeids)
    for report in _get_session_attribute(session, "_worker_reports"):
        for nodeid in skipped.intersection(report["selected"]):
            report["selected"][nodeid] = "skipped"


def _repeat_assertion(item: pytest.Item, source: RankAssertion) -> str:
    """Repeat a rank's assertion; return why it failed, or an empty string."""
    config = item.config
    assertion = SnapshotAssertion(
        session=_get_syrupy_session(config),
        extension_class=_import_extension_class(item, source),
        test_location=PyTestLocation(item),
        update_snapshots=bool(config.option.update_snapshots),
        update_new_snapshots_only=bool(getattr(config.option, "update_new_snapshots_only", False)),
    )
    # Patch this instance, not the class: syrupy identifies extensions by class, and also uses the
    # class to batch the writes to a file.
    assertion.extension.serialize = lambda data, **_: data  # type: ignore[method-assign]  # see above
    if isinstance(source.index, str):
        assertion(name=source.index)
    else:
        if not hasattr(assertion, "_executions"):
            raise upstream.moved_error("syrupy", "SnapshotAssertion._executions", _USE)
        assertion._executions = source.index
    is_same = assertion == (source.data.encode("latin-1") if source.is_bytes else source.data)
    result = assertion.executions[assertion.num_executions - 1]
    if isinstance(assertion.extension, CommSnapshotExtension):
        note_update(item, result)
    if is_same:
        return ""
    if result.exception is not None:
        return str(result.exception) or type(result.exception).__name__
    where = show_path(Path(result.snapshot_location), config.rootpath)
    return (
        f"a comparison with {where} failed, but the test continued: the failure was caught, or the "
        "result was not asserted (or the file changed while the test ran)"
    )


def _import_extension_class(
    item: pytest.Item, source: RankAssertion
) -> type[AbstractSyrupyExtension]:
    extension: Any = importlib.import_module(source.module)
    for name in source.qualname.split("."):
        extension = getattr(extension, name, None)
    if not isinstance(extension, type):
        raise FsdpCommError(
            f"the snapshot extension {source.module}.{source.qualname} cannot be imported by name, "
            "so the snapshots of the ranks cannot be written; define the class at module level"
        )
    if extension is CommSnapshotExtension:
        return bind_extension(item)
    return cast("type[AbstractSyrupyExtension]", extension)


def _get_syrupy_session(config: pytest.Config) -> Any:
    if not config.pluginmanager.has_plugin("syrupy"):
        raise FsdpCommError(upstream.NEEDS_SYRUPY)
    session = getattr(config, "_syrupy", None)
    if session is None:
        raise upstream.moved_error("syrupy", "config._syrupy", _USE)
    return session


def _get_session_attribute(session: Any, name: str) -> Any:
    if not hasattr(session, name):
        raise upstream.moved_error("syrupy", f"SnapshotSession.{name}", _USE)
    return getattr(session, name)
