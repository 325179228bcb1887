"""Read DTensor's redistributions off the stack of the collectives that they cause."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.subclasses import nbytes_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_fsdp_comm.recording.mesh_axes import GroupNames


class RedistributionWatch:
    """Notice the first collective of each redistribution."""

    def __init__(self, groups: GroupNames) -> None:
        """Start outside of every redistribution; `groups` learns their meshes."""
        self._groups = groups
        # The steps of the last collective's redistribution, and which it had reached. Held, and not
        # known by the frame, whose address the next one may have. Torch keeps one list for all that
        # are alike, but each begins at the same step.
        self.last: tuple[Any, int] | None = None
        """None once a collective was sent that is part of none."""

    def note_collective(self, found: Mapping[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """Note a collective by the locals of the redistribution that it is part of.

        Returns:
            At its first collective, what makes fields of `events.Redistribution`; None at any
            other.
        """
        try:
            # Read in torch 2.6, 2.9, 2.11, 2.13.
            current, target = found["current_spec"], found["target_spec"]
            local = found["local_tensor"]
        except KeyError as missing:
            raise upstream.misread_error("torch", "redistribute_local_tensor", missing) from missing
        self._groups.learn_mesh(current.mesh)
        infos = found.get("optimized_transform_infos", found.get("transform_infos", []))
        info, step = found.get("transform_info"), 0
        if len(infos) > 1:
            step = next((n for n, one in enumerate(infos) if one is info), 0)
        last, self.last = self.last, (infos, step)
        if last is not None and last[0] is infos and step > last[1]:
            return None
        names = current.mesh.mesh_dim_names or ()
        return partial(_fields, current.placements, target.placements, names, nbytes_held(local))


def _fields(
    source: Sequence[Any], target: Sequence[Any], names: Sequence[str], nbytes: int
) -> dict[str, Any]:
    return {
        "source_placements": tuple(map(repr, source)),
        "target_placements": tuple(map(repr, target)),
        "mesh_axes": tuple(map(printable, names)),
        "nbytes": nbytes,
    }
