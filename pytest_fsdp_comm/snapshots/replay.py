"""Ranks read snapshots and never write them: what rank 0 asserted is asserted again in the parent.

syrupy decides in one process what is written, counted and removed. Private names of syrupy 7.0 are
used here and nowhere else: ``config._syrupy``, ``SnapshotSession._assertions`` and
``_worker_reports``, and ``SnapshotAssertion._executions``; tests/unit/test_replay.py fails when one
moves.
"""

from __future__ import annotations

import base64
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from syrupy.assertion import SnapshotAssertion
from syrupy.location import PyTestLocation

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.explain import describe_error
from pytest_fsdp_comm.snapshots.extension import CommSnapshotExtension, bind_extension

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import pytest

Outcome = Literal["passed", "failed", "skipped"]

_USE: Final = "snapshots in ranks rely on"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an assertion asked syrupy for."""

    extension: type
    index: int | str


class RankSnapshots:
    """Carries a test's snapshot assertions from rank 0 to the parent."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._asked: dict[tuple[str, str], _Asked] = {}
        self._replayed: dict[type, type] = {}

    def enter_rank(self, config: pytest.Config) -> None:
        """Makes syrupy's session in a rank read-only, and notes what it is asked for."""
        session = _session(config)
        recall = session.recall_snapshot

        def noting_recall(extension: Any, test_location: Any, index: Any) -> Any:
            location = extension.get_location(test_location=test_location, index=index)
            name = extension.get_snapshot_name(test_location=test_location, index=index)
            self._asked[location, name] = _Asked(type(extension), index)
            return recall(extension, test_location, index)

        session.recall_snapshot = noting_recall
        session.queue_snapshot_write = _write_nothing

    def rank_payload(self, item: pytest.Item) -> list[dict[str, Any]]:
        """The assertions that the test made in this rank."""
        session = _session(item.config)
        made = []
        for assertion in _get(session, "_assertions"):
            for _, result in sorted(assertion.executions.items()):
                asked = self._asked.get((result.snapshot_location, result.snapshot_name))
                if asked is not None and result.asserted_data is not None:
                    made.append(_described(asked, result.asserted_data))
        # Ranks that run several tests begin the next one with none.
        _get(session, "_assertions").clear()
        self._asked.clear()
        return made

    def merge(self, item: pytest.Item, payloads: Mapping[int, Any], outcome: Outcome) -> list[str]:
        """Asserts again what the lowest rank asserted, on the session that writes.

        Returns:
            Why it failed here though it had passed in the ranks, such as a file that cannot be
            written; empty if it did not.
        """
        if not payloads:
            return []
        problems = []
        for made in payloads[min(payloads)]:
            failure = self._assert_again(item, made)
            if failure and outcome != "failed":
                problems.append(failure)
        return problems

    def _assert_again(self, item: pytest.Item, made: Mapping[str, Any]) -> str:
        config = item.config
        extension: Any = self._replaying(_extension(made))
        if issubclass(extension, CommSnapshotExtension):
            extension = bind_extension(extension, item)
        assertion = SnapshotAssertion(
            session=_session(config),
            extension_class=extension,
            test_location=PyTestLocation(item),
            update_snapshots=bool(config.option.update_snapshots),
            update_new_snapshots_only=bool(
                getattr(config.option, "update_new_snapshots_only", False)
            ),
        )
        index, data = made["index"], made["data"]
        if made["is_bytes"]:
            data = base64.b64decode(data)
        if isinstance(index, str):
            assertion(name=index)
        else:
            if not hasattr(assertion, "_executions"):
                raise upstream.moved("syrupy", "SnapshotAssertion._executions", _USE)
            assertion._executions = index  # noqa: SLF001  # see the module's docstring
        if assertion == data:
            return ""
        result = assertion.executions[assertion.num_executions - 1]
        if result.exception is not None:
            return describe_error(result, config.rootpath)
        return f"the snapshot {result.snapshot_location} changed while the test ran"

    def _replaying(self, extension: type) -> type:
        """A subclass that takes data which are serialized already."""
        if extension not in self._replayed:
            body = {
                "__module__": extension.__module__,
                "__qualname__": extension.__qualname__,
                "serialize": lambda _self, data, **_: data,
            }
            self._replayed[extension] = type(extension.__name__, (extension,), body)
        return self._replayed[extension]


def compared_files(config: pytest.Config) -> list[str]:
    """The snapshot files that this process's assertions compared or wrote."""
    return sorted(
        {
            result.snapshot_location
            for assertion in _get(_session(config), "_assertions")
            for result in assertion.executions.values()
        }
    )


def keep_plain_snapshots(config: pytest.Config, nodeids: Collection[str]) -> None:
    """Keeps what plain ``snapshot`` assertions of some tests wrote, though they did not ask for it.

    For syrupy 7.0 the snapshots of a test that failed early, or never ran, are unused, and
    ``--snapshot-update`` deletes them; those of a skipped test are not.

    Args:
        config: Of xdist's controller, or of the only process.
        nodeids: The tests that did not pass.
    """
    session = _session(config)
    for nodeid in nodeids:
        session.ran_item(nodeid, "skipped")
    kept = set(nodeids)
    for report in _get(session, "_worker_reports"):
        for nodeid in kept.intersection(report["selected"]):
            report["selected"][nodeid] = "skipped"


def _write_nothing(**_: Any) -> None:
    pass


def _described(asked: _Asked, data: Any) -> dict[str, Any]:
    is_bytes = isinstance(data, bytes)
    return {
        "extension": [asked.extension.__module__, asked.extension.__qualname__],
        "is_ours": issubclass(asked.extension, CommSnapshotExtension),
        "index": asked.index,
        "is_bytes": is_bytes,
        "data": base64.b64encode(data).decode("ascii") if is_bytes else str(data),
    }


def _extension(made: Mapping[str, Any]) -> type:
    if made["is_ours"]:
        return CommSnapshotExtension
    module, name = made["extension"]
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise FsdpCommError(
            f"the snapshot extension {module}.{name} cannot be imported by name, so that what the "
            "ranks asserted cannot be written; define it at the top of a module"
        )
    return found


def _session(config: pytest.Config) -> Any:
    session = getattr(config, "_syrupy", None)
    if session is None:
        raise upstream.moved("syrupy", "config._syrupy", _USE)
    return session


def _get(session: Any, name: str) -> Any:
    if not hasattr(session, name):
        raise upstream.moved("syrupy", f"SnapshotSession.{name}", _USE)
    return getattr(session, name)
