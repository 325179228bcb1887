"""Capture how a model is sharded, without running or changing it, and without communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.mesh_axes import rank_size_and_backend
from pytest_fsdp_comm.sharding.readers import fsdp2_meshes, read_ddp, read_fsdp1, read_fsdp2
from pytest_fsdp_comm.sharding.units import (
    AxisNames,
    ReadParameter,
    ReadUnit,
    Slot,
    Visit,
    dtensor_meshes,
    read_parameter,
    read_placements,
    visit_modules,
)
from pytest_fsdp_comm.text.fqn import ROOT_TEXT, fold_fqns, natural_key
from pytest_fsdp_comm.tree.finding import FindingSettings
from pytest_fsdp_comm.tree.findings.rules import find
from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit


@upstream.private_names("a class or module that fsdp_tree reads")
def capture_tree(
    model: nn.Module | Sequence[nn.Module], findings: FindingSettings | None = None
) -> ShardTree:
    """Capture how a model is sharded; `model` may be a list of the parts that this rank runs."""
    visit = visit_modules(model)
    axes = AxisNames(chain(fsdp2_meshes(visit), dtensor_meshes(visit)))
    units = [*read_fsdp2(visit, axes), *read_fsdp1(visit, axes)]
    managed = {slot for unit in units for entry in unit.managed for slot in entry.slots}
    units += read_ddp(visit, axes, managed)
    units.sort(key=lambda read: read.unit.modules[0])
    parameters, by_slot = _collect_parameters(visit, units, axes)
    rank, world_size, backend = rank_size_and_backend()
    meta = sum(parameter.device == "meta" for parameter in parameters)
    on_meta = f"{meta} of {len(parameters)} parameters are on the meta device and hold no data yet"
    tree = ShardTree(
        rank=rank,
        world_size=world_size,
        backend=backend,
        torch_version=torch.__version__,
        mesh_axes=axes.used,
        modules=tuple(visit.nodes),
        parameters=parameters,
        units=tuple(_resolve_unit_references(units, by_slot)),
        notes=(on_meta,) if meta else (),
    )
    return replace(tree, findings=find(tree, findings or FindingSettings()))


def _collect_parameters(
    visit: Visit, units: Sequence[ReadUnit], axes: AxisNames
) -> tuple[tuple[ParameterNode, ...], dict[Slot, int]]:
    managers = {
        slot: (number, entry)
        for number, read in enumerate(units)
        for entry in read.managed
        for slot in entry.slots
    }
    by_tensor: dict[int, tuple[int | None, ReadParameter, list[Slot]]] = {}
    for slot, tensor in _list_slots_with_tensors(visit, managers):
        number, managed = managers.get(slot, (None, None))
        key = id(managed or tensor)
        if key not in by_tensor:
            by_tensor[key] = (
                number,
                managed or _read_unmanaged_parameter(tensor, visit, slot, axes),
                [],
            )
        by_tensor[key][2].append(slot)
    unfilled = _count_unfilled_nbytes([entry for _, entry, _ in by_tensor.values()])
    by_slot: dict[Slot, int] = {}
    origins: dict[object, int] = {}
    parameters = []
    for index, (unit, entry, unordered) in enumerate(by_tensor.values()):
        slots = unordered
        if len(slots) > 1:  # only the slots of tied parameters are sorted by FQN
            slots = sorted(
                slots, key=lambda slot: natural_key(f"{_module_path(visit, slot[0])}.{slot[1]}")
            )
        by_slot.update(dict.fromkeys(slots, index))
        first = index if entry.origin is None else origins.setdefault(entry.origin, index)
        (module, name), *tied = slots
        parameters.append(
            replace(
                entry.node,
                module=module,
                name=name,
                tied=tuple(tied),
                unit=unit,
                split_from=None if first == index else first,
                nbytes_unfilled=unfilled.get(index, 0),
            )
        )
    return tuple(parameters), by_slot


def _count_unfilled_nbytes(entries: Sequence[ReadParameter]) -> dict[int, int]:
    """Count the bytes of storages that no parameter fills, for the first parameter of each."""
    # Parameters can share a storage: flat buffers, fused weights, a parameter tied as a view.
    filled: Counter[int] = Counter()
    first: dict[int, int] = {}
    for index, entry in enumerate(entries):
        if entry.storage is not None:
            key = entry.storage._cdata  # `data_ptr` is 0 on the meta device
            filled[key] += entry.nbytes_filled
            first.setdefault(key, index)
    return {
        index: storage.nbytes() - filled[key]
        for key, index in first.items()
        if (storage := entries[index].storage) is not None and storage.nbytes() > filled[key]
    }


def _list_slots_with_tensors(
    visit: Visit, managers: dict[Slot, tuple[int, ReadParameter]]
) -> Iterator[tuple[Slot, Any]]:
    """Yield slots in registration order, each with its tensor, or None if only the unit has it."""
    unregistered: dict[int, list[str]] = {}
    for index, name in managers:
        if name not in visit.modules[index]._parameters:  # FSDP1 without use_orig_params removes it
            unregistered.setdefault(index, []).append(name)
    for index, node in enumerate(visit.nodes):
        if node.alias_of is not None:
            continue
        for name, tensor in visit.modules[index]._parameters.items():
            if tensor is not None and not getattr(tensor, "_is_flat_param", False):
                yield (index, name), tensor
        for name in unregistered.get(index, ()):
            yield (index, name), None


def _read_unmanaged_parameter(
    tensor: torch.Tensor, visit: Visit, slot: Slot, axes: AxisNames
) -> ReadParameter:
    if isinstance(tensor, UninitializedParameter):
        index, name = slot
        raise RecordingError(
            f"fsdp_tree found a parameter without a shape: {name} of module "
            f"{_module_path(visit, index)} is still lazy; run the model once before you shard it"
        )
    placements = read_placements(tensor, axes) if isinstance(tensor, DTensor) else ()
    # FSDP2 marks each tensor that it shards (in torch 2.13, not in 2.7). If such a tensor is still
    # registered in another module, the mark shows that the two parameters were tied.
    return read_parameter(tensor, placements, origin=getattr(tensor, "_fsdp_orig_uid", None))


def _module_path(visit: Visit, index: int) -> str:
    names = [visit.nodes[above].name for above in (*reversed([*visit.ancestors(index)]), index)]
    return ".".join(names[1:]) or ROOT_TEXT


def _resolve_unit_references(
    units: Sequence[ReadUnit], by_slot: dict[Slot, int]
) -> Iterator[ShardUnit]:
    numbers: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        numbers.setdefault(id(unit.state), []).append(number)

    def number_states(states: tuple[object, ...]) -> tuple[int, ...]:
        return tuple(number for state in states for number in numbers.get(id(state), ()))

    for read in units:
        yield replace(
            read.unit,
            parameters=tuple(by_slot[slot] for entry in read.managed for slot in entry.slots[:1]),
            forward_prefetch=number_states(read.forward_prefetch),
            backward_prefetch=number_states(read.backward_prefetch),
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WrapExpectation:
    """The modules that an auto-wrap policy would wrap, and the actual units, both without roots."""

    expected: tuple[str, ...]
    """FQNs of the modules that the policy would wrap, in registration order."""
    wrapped: tuple[str, ...]
    """FQNs of the units, in registration order."""

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(fqn for fqn in self.expected if fqn not in set(self.wrapped))

    @property
    def unexpected(self) -> tuple[str, ...]:
        return tuple(fqn for fqn in self.wrapped if fqn not in set(self.expected))

    def __bool__(self) -> bool:
        return self.expected == self.wrapped

    def __str__(self) -> str:
        parts = [
            f"{len(fqns)} {problem}: {', '.join(fold_fqns(fqns))}"
            for problem, fqns in (
                ("not wrapped, although the policy wraps them", self.missing),
                ("wrapped, although the policy does not wrap them", self.unexpected),
            )
            if fqns
        ]
        return "; ".join(parts) or f"all {len(self.expected)} expected modules are wrapped"

    def __repr__(self) -> str:
        return f"<{self}>"  # pytest shows it if `assert fsdp_tree.expect(...)` fails


def expect_units(model: nn.Module | Sequence[nn.Module], policy: object) -> WrapExpectation:
    """Compare the units of `model`, or of its parts, with those that a policy would create."""
    visit = visit_modules(model)
    tree = capture_tree(model)
    roots = {index for index, node in enumerate(visit.nodes) if node.parent is None}
    chosen = _select_by_wrap_policy(visit, tree.parameters, model, policy) - roots
    # Several models may be passed in a ModuleDict. Each of them may be a unit, as a root may be.
    roots |= {
        index
        for index in range(len(visit.nodes))
        if index not in chosen
        and not any(visit.nodes[above].has_forward for above in visit.ancestors(index))
    }
    units = {module for unit in tree.units for module in unit.modules} - roots
    return WrapExpectation(
        expected=tuple(tree.module_fqn(index) for index in sorted(chosen)),
        wrapped=tuple(tree.module_fqn(index) for index in sorted(units)),
    )


def _select_by_wrap_policy(
    visit: Visit, parameters: object, model: nn.Module | Sequence[nn.Module], policy: Any
) -> set[int]:
    if isinstance(policy, (set, frozenset)):
        policy = ModuleWrapPolicy(policy)
    # All of torch's policy objects have this method (torch.distributed.fsdp.wrap._Policy, the same
    # in torch 2.7, 2.13 and 2.15).
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        parts = model if isinstance(model, Sequence) else [model]
        return {
            visit.index_of[id(module)]
            for part in parts
            for module in run(root_module=part, ignored_modules=set(), root_kwargs={})
        }
    if not callable(policy):
        raise RecordingError(
            "fsdp_tree.expect expected an auto-wrap policy (ModuleWrapPolicy, a callable of "
            "module, recurse and nonwrapped_numel, or a set of module classes), got "
            f"{type(policy).__name__}"
        )
    return _select_by_callable(visit, parameters, policy)


def _select_by_callable(visit: Visit, parameters: Any, policy: Callable[..., bool]) -> set[int]:
    """Return the indices of the modules that torch's ``fsdp.wrap._recursive_wrap`` would wrap."""
    numels = [0] * len(visit.nodes)
    for parameter in parameters:
        numels[parameter.module] += parameter.numel
        for above in visit.ancestors(parameter.module):
            numels[above] += parameter.numel
    entered: dict[int, None] = {}
    for index, node in enumerate(visit.nodes):
        is_reached = node.alias_of is None and (node.parent is None or node.parent in entered)
        module = visit.modules[index]
        if is_reached and policy(module=module, recurse=True, nonwrapped_numel=numels[index]):
            entered[index] = None
    wrapped_inside = [0] * len(visit.nodes)
    chosen: set[int] = set()
    # Iterate in reverse, so that each module comes before its parent.
    for index in reversed(entered):
        unwrapped = numels[index] - wrapped_inside[index]
        module = visit.modules[index]
        parent = visit.nodes[index].parent
        if parent is None:
            continue
        if policy(module=module, recurse=False, nonwrapped_numel=unwrapped):
            chosen.add(index)
            wrapped_inside[index] = numels[index]
        wrapped_inside[parent] += wrapped_inside[index]
    return chosen
