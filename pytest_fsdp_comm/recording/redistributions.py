"""Reads DTensor's redistributions off the stack of the collectives that they cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.comm.events import Redistribution

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from pytest_fsdp_comm.recording.owners.place import Place
    from pytest_fsdp_comm.recording.owners.stack import Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A redistribution, at its first collective."""

    source_placements: tuple[str, ...]
    target_placements: tuple[str, ...]
    mesh_axes: tuple[str, ...]
    is_explicit: bool | None
    nbytes: int

    def event(self, index: int, place: Place) -> Redistribution:
        """As a record; its modules are named later."""
        return Redistribution(
            index=index,
            owner=None,
            issued_in=None,
            phase=place.phase,
            source_placements=self.source_placements,
            target_placements=self.target_placements,
            mesh_axes=self.mesh_axes,
            is_explicit=self.is_explicit,
            nbytes=self.nbytes,
            call_site=place.scan.call_site,
        )


class RedistributionWatch:
    """Notices the first collective of each redistribution."""

    def __init__(self) -> None:
        """Has seen none."""
        self._last: tuple[int, int] | None = None

    def begun(self, scan: Scan, learn_mesh: Callable[[DeviceMesh], None]) -> Begun | None:
        """Looks at a collective's stack and lets go of it.

        Args:
            scan: The stack; its frame of the redistribution is taken out, since a frame keeps all
                its tensors alive.
            learn_mesh: Told the mesh.

        Returns:
            The redistribution, if this is its first collective; None otherwise.
        """
        frame, scan.redistribution = scan.redistribution, None
        if frame is None:
            self._last = None
            return None
        # The names of these locals were read in torch 2.6, 2.9, 2.11, 2.13.
        found: dict[str, Any] = frame.f_locals
        current, target = found["current_spec"], found["target_spec"]
        learn_mesh(current.mesh)
        infos = found.get("optimized_transform_infos", found.get("transform_infos", []))
        step = next((n for n, info in enumerate(infos) if info is found.get("transform_info")), 0)
        previous, self._last = self._last, (id(frame), step)
        if previous is not None and previous[0] == id(frame) and step > previous[1]:
            return None
        local = found["local_tensor"]
        return Begun(
            source_placements=tuple(repr(placement) for placement in current.placements),
            target_placements=tuple(repr(placement) for placement in target.placements),
            mesh_axes=tuple(current.mesh.mesh_dim_names or ()),
            is_explicit=found.get("is_explicit"),
            nbytes=local.numel() * local.element_size(),
        )
