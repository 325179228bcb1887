"""Events while their recording runs: complete but for the names of modules and groups.

The names come last. A mesh that names a group, the root that names modules and the replica that a
bucket serves may all show up after their first use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pytest_fsdp_comm.comm.events import (
    Collective,
    HostDeviceCopy,
    Phase,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.recording.owners.attribution import Attribution

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.recording.owners.attribution import OwnerNames

Event = TypeVar("Event", bound=Collective | Reshard | Redistribution | HostDeviceCopy)

_REDUCING: Final = frozenset({"reduce_scatter", "all_reduce", "reduce"})
_IN_MODULES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending(Generic[Event]):
    """An event whose call has returned."""

    event: Event
    """Without names of modules, role, distance to its use, axis and group size."""
    attribution: Attribution
    """Its owner is the unit that was unsharded or resharded, where that is the event."""
    group: str | None = None
    """The key of a collective's group in `GroupNames`; None if the operation shows none."""

    def named(self, names: OwnerNames, axes: Mapping[str, MeshAxis]) -> Event:
        """The event.

        Args:
            names: Of modules.
            axes: By the keys of their groups.
        """
        owner = names.owner(self.attribution)
        found: dict[str, Any] = (
            {"module": owner} if isinstance(self.event, Reshard) else {"owner": owner}
        )
        if not isinstance(self.event, HostDeviceCopy):
            found["issued_in"] = names.issued_in(self.attribution)
        if isinstance(self.event, (Collective, Reshard)):
            found["ahead"] = self.attribution.ahead  # known once the unit is used
        if isinstance(self.event, Collective):
            found["role"] = _role(self.event.kind, self.attribution)
        if self.group is not None:
            axis = axes[self.group]
            found |= {"axis": axis.name, "group_size": axis.size}
        return replace(self.event, **found)


def _role(kind: str, attribution: Attribution) -> Role | None:
    if attribution.source is Source.FSDP:
        return Role.GRADIENTS if kind in _REDUCING else Role.PARAMETERS
    if attribution.source is Source.DDP:
        # Its broadcasts carry buffers, and how it has rebuilt its buckets.
        return Role.GRADIENTS if kind in _REDUCING else None
    if attribution.source is Source.OBJECT or attribution.phase not in _IN_MODULES:
        return None
    if attribution.adds_gradient:
        return Role.GRADIENTS
    return Role.ACTIVATIONS if attribution.owner else None
