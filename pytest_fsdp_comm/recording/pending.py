"""Events of a running recording, before modules and process groups have names."""

# Note [Names come last]
# Modules and groups get their names when the recording ends, or when a test queries it in the
# block. The mesh that names a group, the root that FQNs are relative to, and the DDP replica that a
# bucket serves may become known only after the event. The prefetch distance of a gather is known
# only once its unit is used. Until then, an event stores module objects and the key of its group.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from torch import nn

from pytest_fsdp_comm.comm.events import (
    REDUCING,
    Beside,
    Collective,
    HostWait,
    Phase,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.recording.operations import join_dtypes
from pytest_fsdp_comm.recording.overlap import Overlap
from pytest_fsdp_comm.recording.owners.attribution import Attribution
from pytest_fsdp_comm.recording.owners.fsdp import registered_parameters, unit_parameters
from pytest_fsdp_comm.recording.owners.module_names import (
    ModuleNames,
    Modules,
    find_replicating_group,
)

Event = TypeVar("Event", bound=Collective | Reshard | Redistribution | HostWait)

_REDUCES: Final = frozenset({Phase.BACKWARD, Phase.OUTSIDE})
"""The phases in which a reduction may belong to one of several backward passes."""
IN_MODULES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
"""The phases in which modules, or their backward, run."""


@dataclass(slots=True)
class Pending(Generic[Event]):
    """An event whose module and group have no names yet. See Note [Names come last]."""

    record: type[Event]
    index: int
    """The event's position in the recording, starting at 0."""
    attribution: Attribution
    """For a `Reshard`, the owner is the unit that was unsharded or resharded."""
    fields: dict[str, Any]
    """The fields of the record that were known at the time of the call."""
    group: str | None = None
    """The key of a collective's group in `GroupNames`; None if its arguments name no group."""
    parts: tuple[tuple[str, int], ...] = ()
    """Each tensor's dtype and bytes in a reduce-scatter, because gloo sends them one by one."""
    position: Any = None
    """A collective's position for `Overlap.work_beside`; None if its overlap is unknown."""

    def finish(
        self,
        names: OwnerNames,
        axes: Mapping[str, MeshAxis],
        members: Mapping[str, tuple[tuple[int, ...], int]],
    ) -> Event:
        """Return the finished event, with names; the mappings are those of `GroupNames`."""
        call, record = self.attribution, self.record
        values = {**self.fields, "index": self.index, "phase": call.phase}
        values["issued_in"] = names.modules.fqn(next(iter(call.issued_in), None))
        values["module" if record is Reshard else "owner"] = names.owner(call)
        kind = values.get("kind", "")
        # Among collectives, only all-gathers have a prefetch distance. An FSDP extension such as
        # float8 may issue collectives of other kinds before the all-gather.
        gather = call.gather if record is Reshard or kind == "all_gather" else None
        if record is Reshard or record is Collective:
            values["ahead"] = gather and gather.ahead
        if record is Collective:
            if gather and gather.dtypes and values["dtype"] == "uint8":
                values["dtype"] = join_dtypes(chain(*gather.dtypes))
            values["source"] = call.source
            values["role"] = _decide_role(kind, values["dtype"], call)
            axis = None
            if self.group is not None:
                axis = axes[self.group]
                values["group_ranks"], values["group_number"] = members[self.group]
            values["axis"] = "" if axis is None else axis.name
            after = values.pop("after_backwards")
            if values["role"] is Role.GRADIENTS and call.phase in _REDUCES and kind in REDUCING:
                values["backward"], values["num_backwards"] = names.backward_number_and_count(
                    call, after
                )
                values["parameters"] = names.parameter_fqns(call.reduced)
            values["group_size"] = 0 if axis is None else axis.size
            if self.position is not None:
                values["beside"] = names.modules_beside(self.position)
                values["exposed"] = not values["beside"]
        return record(**values)


class OwnerNames:
    """Look up the FQNs of the modules in attributions. See Note [Names come last]."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        backwards: Sequence[Collection[int]],
        overlap: Overlap | None,
        *,
        are_parts: bool,
    ) -> None:
        self.modules = ModuleNames(roots, are_parts=are_parts)
        self._roots = roots
        self._backwards = backwards
        self._overlap = overlap
        self._passes: dict[tuple[Source, tuple[int, ...]], list[int]] = {}

    def owner(self, attribution: Attribution) -> str | None:
        """Return the owner's FQN; None if there is no owner, or it is outside all roots."""
        return self.modules.join_fqns(self._find_owning_modules(attribution))

    def _find_owning_modules(self, attribution: Attribution) -> Modules:
        label = attribution.label
        if label is not None:
            registering = self._modules_by_parameter_id.get(id(label.parameter), {})
            return tuple(registering.values())
        if attribution.source is Source.DDP:
            return self._find_ddp_replica(attribution.issued_in)
        return attribution.owner

    def parameter_fqns(self, registered: Iterable[tuple[nn.Module, str]]) -> tuple[str, ...]:
        """Return the FQNs of parameters; each is given as its module and its name there."""
        paths = [(self.modules.fqn(module), name) for module, name in registered]
        return tuple(f"{fqn}.{name}" if fqn else name for fqn, name in paths)

    def modules_beside(self, position: object) -> tuple[Beside, ...]:
        """Return the modules whose operations can hide a collective, in order of appearance."""
        flops: Counter[str | None] = Counter()
        for module, amount in () if self._overlap is None else self._overlap.work_beside(position):
            flops[None if module is None else self.modules.fqn(module)] += amount
        return tuple(Beside(module=fqn, flops=amount) for fqn, amount in flops.items())

    def _find_ddp_replica(self, running: Modules) -> Modules:
        """Return the DDP replica that contains `running`, or else the first replica or root."""
        replicas = self._replica_by_module_id
        around = [replicas[id(module)] for module in running if id(module) in replicas]
        return tuple((around or [*replicas.values()] or self._roots)[:1])

    def backward_number_and_count(
        self, call: Attribution, after: int
    ) -> tuple[int | None, int | None]:
        """Return which backward pass a reduction follows, and how many passes there are."""
        # Count only passes that add to the reduced gradients, and return (None, None) unless there
        # are several. `after` is the number of all passes that began before the reduction.
        if len(self._backwards) <= 1:
            return None, None
        source, modules = call.source, self._find_owning_modules(call)
        ids = tuple(map(id, modules))
        if (source, ids) not in self._passes:
            reduced = {id(parameter) for module in modules for parameter in module.parameters()}
            if source is Source.FSDP:
                reduced = self._parameter_ids_by_unit[ids]
            elif source is not Source.DDP:
                # If the modules are unknown, use the parameters of all modules.
                reduced = {
                    parameter
                    for parameter, by in self._modules_by_parameter_id.items()
                    if not ids or by.keys() & ids
                }
            self._passes[source, ids] = [
                number
                for number, added in enumerate(self._backwards, 1)
                if not reduced.isdisjoint(added)
            ]
        passes = self._passes[source, ids]
        number = sum(begun <= after for begun in passes)
        return (number, len(passes)) if number and len(passes) > 1 else (None, None)

    @cached_property
    def _parameter_ids_by_unit(self) -> defaultdict[tuple[int, ...], set[int]]:
        parameter_ids: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for modules, parameter in unit_parameters(self.modules.modules):
            parameter_ids[tuple(map(id, modules))].add(id(parameter))
        return parameter_ids

    @cached_property
    def _replica_by_module_id(self) -> dict[int, nn.Module]:
        modules = (module for root in self._roots for module in root.modules())
        replicas = (module for module in modules if find_replicating_group(module) is not None)
        # Parents come first, so an inner replica overrides an outer one.
        return {id(child): replica for replica in replicas for child in replica.modules()}

    @cached_property
    def _modules_by_parameter_id(self) -> dict[int, dict[int, nn.Module]]:
        registering: dict[int, dict[int, nn.Module]] = {}
        for parameter, module in registered_parameters(self._roots):
            registering.setdefault(id(parameter), {})[id(module)] = module
        return registering


def _decide_role(kind: str, dtype: str, attribution: Attribution) -> Role | None:
    if attribution.label is not None:
        return attribution.label.role
    if attribution.source is Source.FSDP:
        reduces = kind in REDUCING and attribution.gather is None
        return Role.GRADIENTS if reduces else Role.PARAMETERS
    if attribution.source is Source.DDP:
        return _decide_role_for_ddp(kind, dtype, attribution)
    if attribution.source is Source.OBJECT or attribution.phase not in IN_MODULES:
        return None
    if attribution.adds_gradient:
        return Role.GRADIENTS
    return Role.ACTIVATIONS if attribution.owner else None


def _decide_role_for_ddp(kind: str, dtype: str, attribution: Attribution) -> Role | None:
    # In forward, DDP broadcasts buffers, and the layout of rebuilt buckets as int32. In backward,
    # it reduces gradients, and the map of used parameters as int32. `Join` sends counts of ranks.
    is_integer = dtype.startswith(("int", "uint"))
    if attribution.phase is Phase.FORWARD:
        return Role.BUFFERS if kind == "broadcast" and dtype != "int32" else None
    if kind not in REDUCING:
        return None
    if is_integer and not attribution.is_from_hook:
        return Role.UNUSED_PARAMETERS
    is_count = is_integer and attribution.phase is Phase.OUTSIDE
    return None if is_count else Role.GRADIENTS
