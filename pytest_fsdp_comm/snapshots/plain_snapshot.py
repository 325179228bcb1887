"""Keeps recordings and trees out of syrupy's own ``snapshot``."""

from __future__ import annotations

import sys
from typing import Any, Final

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fsdp_comm.errors import FsdpCommError

# The module and name of each class, and how a test writes its value.
_REFUSED: Final = {
    ("recording.comm_mode", "CommMode"): "comm_mode",
    ("tree.model", "ShardTree"): "fsdp_tree(model)",
    ("fsdp_tree", "TreeFactory"): "fsdp_tree(model)",
}


def refuse_recordings(config: pytest.Config) -> None:
    """Make every comparison of the session with a plain ``snapshot`` look for what is refused."""
    # syrupy would write one line of a recording, and all fields of one rank's tree with torch's
    # version. Its fixture may be overridden, wrapped and given any extension, so this replaces the
    # method with which all of them compare.
    compare = SnapshotAssertion.__eq__

    def refuse_or_compare(snapshot: SnapshotAssertion, other: object) -> bool:
        __tracebackhide__ = True
        classes = _loaded()
        if not classes:
            return compare(snapshot, other)
        found: list[str] = []
        serialize = snapshot.extension.serialize

        # It runs within syrupy's comparison, which thus counts the stored entry as used.
        def serialize_checked(data: Any, *, matcher: Any = None, **options: Any) -> Any:
            def check(*, data: Any, path: Any) -> Any:
                for cls, name in classes.items():
                    # Never isinstance(), which runs the code of proxies.
                    if issubclass(type(data), cls):
                        found.append(name)
                        raise FsdpCommError(name)
                return data if matcher is None else matcher(data=data, path=path)

            # Extensions that do not look into a value call no matcher.
            return serialize(check(data=data, path=()), matcher=check, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snapshot.extension, "serialize", serialize_checked)
            is_equal = compare(snapshot, other)
        if found:
            raise FsdpCommError(
                f"syrupy's `snapshot` does not know what counts in {found[0]}, so nothing was "
                "compared or written; take the fixture comm_snapshot: "
                f"assert {found[0]} == comm_snapshot"
            )
        return is_equal

    session_patch = pytest.MonkeyPatch()
    session_patch.setattr(SnapshotAssertion, "__eq__", refuse_or_compare)
    config.add_cleanup(session_patch.undo)


def _loaded() -> dict[type, str]:
    # A class that is not imported has no values in this process.
    return {
        getattr(sys.modules[module], name): shown
        for (room, name), shown in _REFUSED.items()
        if (module := f"pytest_fsdp_comm.{room}") in sys.modules
    }
