"""Keeps recordings and trees out of syrupy's own ``snapshot``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fsdp_comm.errors import FsdpCommError

# How deep recordings are looked for: values may contain themselves.
_DEPTH: Final = 4

# How a test writes a value of each class.
_REFUSED: Final = {
    "pytest_fsdp_comm.recording.comm_mode.CommMode": "comm_mode",
    "pytest_fsdp_comm.tree.model.ShardTree": "fsdp_tree(model)",
    "pytest_fsdp_comm.fsdp_tree.TreeFactory": "fsdp_tree(model)",
}


def refuse_recordings(config: pytest.Config) -> None:
    """Make every comparison of the session with a plain ``snapshot`` look for what is refused."""
    # syrupy would write one line of a recording, and all fields of one rank's tree with torch's
    # version. Its fixture may be overridden, wrapped and given any extension, so this replaces the
    # method with which all of them compare.
    compare = SnapshotAssertion.__eq__

    def refuse_or_compare(snapshot: SnapshotAssertion, other: object) -> bool:
        __tracebackhide__ = True
        if name := _refused_in(other):
            raise FsdpCommError(
                f"syrupy's `snapshot` does not know what counts in {name}, so nothing was "
                "compared or written; take the fixture comm_snapshot: "
                f"assert {name} == comm_snapshot"
            )
        return compare(snapshot, other)

    session_patch = pytest.MonkeyPatch()
    session_patch.setattr(SnapshotAssertion, "__eq__", refuse_or_compare)
    config.add_cleanup(session_patch.undo)


def _refused_in(value: object, depth: int = _DEPTH) -> str:
    """How a test writes what is refused in a value, or in a dict or list of values; else empty."""
    # By type(), since isinstance() runs the code of proxies.
    kind = type(value)
    if name := _REFUSED.get(f"{kind.__module__}.{kind.__qualname__}"):
        return name
    within: Iterable[object] = ()
    if depth and issubclass(kind, dict):
        within = cast("dict[object, object]", value).values()
    elif depth and issubclass(kind, (list, tuple)):
        within = cast("list[object]", value)
    return next(filter(None, (_refused_in(one, depth - 1) for one in within)), "")
