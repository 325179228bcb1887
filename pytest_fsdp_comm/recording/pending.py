"""Events while their recording runs: complete but for what only its end shows."""

# Note [Names come last]
# An event gets the names of its modules and of its group when its recording ends, or when a test
# queries it in the block. A mesh that names a group, the root that names modules and the replica
# that a bucket serves may all show up after their first use, and how far ahead a gather was issued
# is known once the unit is used. Until then modules are held as such, and a group by its key.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from torch import nn

from pytest_fsdp_comm.comm.events import (
    REDUCING,
    Collective,
    Phase,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.recording.operations import joined_dtypes
from pytest_fsdp_comm.recording.owners.attribution import Attribution
from pytest_fsdp_comm.recording.owners.fsdp import registered_parameters, unit_parameters
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames, Modules, replicated_over

Event = TypeVar("Event", bound=Collective | Reshard | Redistribution)

_REDUCES: Final = frozenset({Phase.BACKWARD, Phase.OUTSIDE})
"""The phases in which it matters how many backward passes came before a reduction."""
IN_MODULES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
"""The phases in which modules run, or their backward does."""


@dataclass(slots=True)
class Pending(Generic[Event]):
    """An event whose call has returned. See Note [Names come last]."""

    record: type[Event]
    index: int
    """Its place in the recording, from 0."""
    attribution: Attribution
    """Its owner is the unit that was unsharded or resharded, where that is the event."""
    fields: dict[str, Any]
    """The fields of the record that its call showed."""
    group: str | None = None
    """The key of a collective's group in `GroupNames`; None if the operation shows none."""
    parts: tuple[tuple[str, int], ...] = ()
    """As of `parts_sent`."""

    def named(self, names: OwnerNames, axes: Mapping[str, MeshAxis]) -> Event:
        """Make the record, with axes by the keys of their groups."""
        own, record = self.attribution, self.record
        found = {**self.fields, "index": self.index, "phase": own.phase}
        found["issued_in"] = names.issued_in(own)
        found["module" if record is Reshard else "owner"] = names.owner(own)
        kind = found.get("kind", "")
        # Not of what an extension (float8) sends before its gather. A reshard has no kind.
        gather = own.gather if record is Reshard or kind == "all_gather" else None
        if record is Reshard or record is Collective:
            found["ahead"] = gather and gather.ahead
        if record is Collective:
            if gather and gather.dtypes and found["dtype"] == "uint8":
                found["dtype"] = joined_dtypes(chain(*gather.dtypes))
            found["source"], found["role"] = own.source, _role(kind, found["dtype"], own)
            axis = None if self.group is None else axes[self.group]
            found["axis"] = "" if axis is None else axis.name
            after = found.pop("after_backwards")
            if found["role"] is Role.GRADIENTS and own.phase in _REDUCES and kind in REDUCING:
                found["backward"], found["num_backwards"] = names.place_of_backward(own, after)
            found["group_size"] = 0 if axis is None else axis.size
        return record(**found)


class OwnerNames:
    """Name the modules of attributions, when a recording ends. See Note [Names come last]."""

    def __init__(
        self, roots: Sequence[nn.Module], backwards: Sequence[Collection[int]], *, are_parts: bool
    ) -> None:
        self.modules = ModuleNames(roots, are_parts=are_parts)
        self._roots = roots
        self._backwards = backwards
        self._passes: dict[tuple[Source, tuple[int, ...]], list[int]] = {}

    def owner(self, attribution: Attribution) -> str | None:
        """The FQN of the owner; None if there is none, or it is below no root."""
        label = attribution.label
        if label is not None:
            registering = self._registering.get(id(label.parameter), {})
            return self.modules.joined(tuple(registering.values()))
        if attribution.source is Source.DDP:
            return self.modules.joined(self._replica_around(attribution.issued_in))
        return self.modules.joined(attribution.owner)

    def issued_in(self, attribution: Attribution) -> str | None:
        """The FQN of the module that was running; None as in `owner`."""
        running = attribution.issued_in
        return self.modules.fqn(running[0]) if running else None

    def _replica_around(self, running: Modules) -> Modules:
        """Find the replicated module around `running`; else the first of the model, or its root."""
        owners = self._replica_of
        known = [owners[id(module)] for module in running if id(module) in owners]
        return tuple((known or [*owners.values()] or self._roots)[:1])

    def place_of_backward(self, own: Attribution, after: int) -> tuple[int | None, int | None]:
        """Of the passes that add to what is reduced: the last of the first `after`, and the number.

        None for both unless there are several.
        """
        if len(self._backwards) <= 1:
            return None, None
        source, modules = own.source, own.owner
        if own.label is not None:
            modules = tuple(self._registering.get(id(own.label.parameter), {}).values())
        elif source is Source.DDP:
            modules = self._replica_around(own.issued_in)
        ids = tuple(map(id, modules))
        if (source, ids) not in self._passes:
            leaves = {id(one) for module in modules for one in module.parameters()}
            if source is Source.FSDP:
                leaves = self._leaves_of_units[ids]
            elif source is not Source.DDP:
                # Of all modules if none is known.
                leaves = {
                    one for one, by in self._registering.items() if not ids or by.keys() & ids
                }
            self._passes[source, ids] = [
                number
                for number, added in enumerate(self._backwards, 1)
                if not leaves.isdisjoint(added)
            ]
        passes = self._passes[source, ids]
        number = sum(one <= after for one in passes)
        return (number, len(passes)) if number and len(passes) > 1 else (None, None)

    @cached_property
    def _leaves_of_units(self) -> defaultdict[tuple[int, ...], set[int]]:
        found: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for modules, parameter in unit_parameters(self.modules.modules):
            found[tuple(map(id, modules))].add(id(parameter))
        return found

    @cached_property
    def _replica_of(self) -> dict[int, nn.Module]:
        modules = (module for root in self._roots for module in root.modules())
        replicas = (module for module in modules if replicated_over(module) is not None)
        # Parents come first, so that an inner replica overrides the outer one.
        return {id(child): replica for replica in replicas for child in replica.modules()}

    @cached_property
    def _registering(self) -> dict[int, dict[int, nn.Module]]:
        found: dict[int, dict[int, nn.Module]] = {}
        for own, module in registered_parameters(self._roots):
            found.setdefault(id(own), {})[id(module)] = module
        return found


def _role(kind: str, dtype: str, attribution: Attribution) -> Role | None:
    if attribution.label is not None:
        return attribution.label.role
    if attribution.source is Source.FSDP:
        reduces = kind in REDUCING and attribution.gather is None
        return Role.GRADIENTS if reduces else Role.PARAMETERS
    if attribution.source is Source.DDP:
        # Its broadcasts carry buffers, and how it has rebuilt its buckets.
        # An int32 is the reducer's map of which parameters were used; gradients are no integers.
        is_map = dtype == "int32" and not attribution.is_from_hook
        reduced = Role.UNUSED_PARAMETERS if is_map else Role.GRADIENTS
        return reduced if kind in REDUCING else None
    if attribution.source is Source.OBJECT or attribution.phase not in IN_MODULES:
        return None
    if attribution.adds_gradient:
        return Role.GRADIENTS
    return Role.ACTIVATIONS if attribution.owner else None
