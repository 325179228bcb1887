"""Refuse comparisons of recordings and trees with syrupy's plain ``snapshot``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fsdp_comm.errors import FsdpCommError

# Search containers to this depth only, as they may contain themselves.
_DEPTH: Final = 4

# Refused classes, and how a test writes a value of each.
_REFUSED: Final = {
    "pytest_fsdp_comm.recording.comm_mode.CommMode": "comm_mode",
    "pytest_fsdp_comm.tree.model.ShardTree": "fsdp_tree(model)",
    "pytest_fsdp_comm.fsdp_tree.TreeFactory": "fsdp_tree(model)",
}


def refuse_recordings(config: pytest.Config) -> None:
    """Make comparisons of this session with a plain ``snapshot`` raise for recordings and trees."""
    # syrupy would write one line for a recording, and for a tree all fields of one rank, torch's
    # version included. Users may override or wrap its fixture and use any extension, so patch the
    # one method that compares for all of them.
    compare = SnapshotAssertion.__eq__

    def refuse_or_compare(snapshot: SnapshotAssertion, value: object) -> bool:
        __tracebackhide__ = True
        if name := _refused_in(value):
            raise FsdpCommError(
                f"syrupy's `snapshot` does not know which parts of {name} to compare, so nothing "
                f"was compared or written; use the fixture comm_snapshot: assert {name} == "
                "comm_snapshot"
            )
        return compare(snapshot, value)

    session_patch = pytest.MonkeyPatch()
    session_patch.setattr(SnapshotAssertion, "__eq__", refuse_or_compare)
    config.add_cleanup(session_patch.undo)


def _refused_in(value: object, depth: int = _DEPTH) -> str:
    """Return how a test writes a refused value, also within dicts and lists; else empty."""
    # Use type(), since isinstance() runs the code of proxies.
    kind = type(value)
    if name := _REFUSED.get(f"{kind.__module__}.{kind.__qualname__}"):
        return name
    elements: Iterable[object] = ()
    if depth and issubclass(kind, dict):
        elements = cast("dict[object, object]", value).values()
    elif depth and issubclass(kind, (list, tuple)):
        elements = cast("list[object]", value)
    return next(filter(None, (_refused_in(element, depth - 1) for element in elements)), "")
