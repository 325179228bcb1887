"""Events while their recording runs: complete but for the names of modules and groups.

The names come last. A mesh that names a group, the root that names modules and the replica that a
bucket serves may all show up after their first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.comm.events import (
    Collective,
    HostDeviceCopy,
    Phase,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.recording.operations import Message
from pytest_fsdp_comm.recording.owners.attribution import Attribution
from pytest_fsdp_comm.recording.owners.fsdp import ReshardAction
from pytest_fsdp_comm.recording.redistributions import RedistributionStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.recording.owners.attribution import OwnerNames

_REDUCING: Final = frozenset({"reduce_scatter", "all_reduce", "reduce"})
_IN_MODULES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCollective:
    """A call that has returned."""

    index: int
    op: str
    attribution: Attribution
    group: str | None
    """The key of its group in `GroupNames`; None if the operation shows none."""
    message: Message
    call_site: str

    def named(self, names: OwnerNames, axes: Mapping[str, MeshAxis]) -> Collective:
        """The event.

        Args:
            names: Of modules.
            axes: By the keys of their groups.
        """
        axis = None if self.group is None else axes[self.group]
        return Collective(
            index=self.index,
            kind=self.message.kind,
            op=self.op,
            owner=names.owner(self.attribution),
            issued_in=names.issued_in(self.attribution),
            phase=self.attribution.phase,
            axis="" if axis is None else axis.name,
            group_size=0 if axis is None else axis.size,
            dtype=self.message.dtype,
            nbytes_sent=self.message.nbytes_sent,
            nbytes_received=self.message.nbytes_received,
            peer=self.message.peer,
            root_rank=self.message.root_rank,
            reduce_op=self.message.reduce_op,
            is_async=self.message.is_async,
            ahead=self.attribution.ahead,
            source=self.attribution.source,
            call_site=self.call_site,
            role=_role(self.message.kind, self.attribution),
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReshard:
    """A unit that was unsharded, or resharded."""

    index: int
    action: ReshardAction
    attribution: Attribution
    """Its owner is the unit."""
    nbytes: int

    def named(self, names: OwnerNames) -> Reshard:
        """The event."""
        return Reshard(
            index=self.index,
            action=self.action,
            module=names.owner(self.attribution),
            issued_in=names.issued_in(self.attribution),
            phase=self.attribution.phase,
            nbytes=self.nbytes,
            ahead=self.attribution.ahead,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRedistribution:
    """A redistribution whose first collective has returned."""

    index: int
    attribution: Attribution
    start: RedistributionStart
    call_site: str

    def named(self, names: OwnerNames) -> Redistribution:
        """The event."""
        return Redistribution(
            index=self.index,
            owner=names.owner(self.attribution),
            issued_in=names.issued_in(self.attribution),
            phase=self.attribution.phase,
            source_placements=self.start.source_placements,
            target_placements=self.start.target_placements,
            mesh_axes=self.start.mesh_axes,
            is_explicit=self.start.is_explicit,
            nbytes=self.start.nbytes,
            call_site=self.call_site,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCopy:
    """A copy that has returned."""

    index: int
    direction: Literal["H2D", "D2H"]
    attribution: Attribution
    nbytes: int
    call_site: str

    def named(self, names: OwnerNames) -> HostDeviceCopy:
        """The event."""
        return HostDeviceCopy(
            index=self.index,
            direction=self.direction,
            owner=names.owner(self.attribution),
            phase=self.attribution.phase,
            nbytes=self.nbytes,
            call_site=self.call_site,
        )
