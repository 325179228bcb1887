"""Refuse to compare recordings and trees with syrupy's plain ``snapshot``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fsdp_comm.errors import FsdpCommError

# How deep to search nested containers. There is a limit, because they may contain themselves.
_DEPTH: Final = 4

# Maps each refused class to the expression that the error message uses for its instances.
_REFUSED: Final = {
    "pytest_fsdp_comm.recording.comm_mode.CommMode": "comm_mode",
    "pytest_fsdp_comm.tree.model.ShardTree": "fsdp_tree(model)",
    "pytest_fsdp_comm.fsdp_tree.TreeFactory": "fsdp_tree(model)",
}


def refuse_recordings(config: pytest.Config) -> None:
    """Make a plain ``snapshot`` raise if this session compares it with a recording or tree."""
    # syrupy would write only a single line about a recording, but every field of one rank's tree,
    # even the torch version. Users may override or wrap syrupy's fixture and use any extension, so
    # patch the method that all comparisons call.
    compare = SnapshotAssertion.__eq__

    def refuse_or_compare(snapshot: SnapshotAssertion, value: object) -> bool:
        __tracebackhide__ = True
        if name := _name_refused_value(value):
            raise FsdpCommError(
                f"syrupy's `snapshot` does not know which parts of {name} to compare, so nothing "
                f"was compared or written; use the fixture comm_snapshot: assert {name} == "
                "comm_snapshot"
            )
        return compare(snapshot, value)

    session_patch = pytest.MonkeyPatch()
    session_patch.setattr(SnapshotAssertion, "__eq__", refuse_or_compare)
    config.add_cleanup(session_patch.undo)


def _name_refused_value(value: object, depth: int = _DEPTH) -> str:
    """Return the name of a refused value, even inside dicts and lists; empty if there is none."""
    # Use type(), because isinstance() runs the code of proxies.
    kind = type(value)
    if name := _REFUSED.get(f"{kind.__module__}.{kind.__qualname__}"):
        return name
    elements: Iterable[object] = ()
    if depth and issubclass(kind, dict):
        elements = cast("dict[object, object]", value).values()
    elif depth and issubclass(kind, (list, tuple)):
        elements = cast("list[object]", value)
    return next(filter(None, (_name_refused_value(element, depth - 1) for element in elements)), "")
