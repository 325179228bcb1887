"""Which modules an auto-wrap policy of torch would wrap, and which are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.sharding.walk import Visit, visit_modules
from pytest_fsdp_comm.text.fqn import fold_fqns


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapExpectation:
    """What a policy would wrap, and what is wrapped; the root is in neither."""

    expected: tuple[str, ...]
    """FQNs that the policy would wrap, children before parents, as auto-wrap goes."""
    wrapped: tuple[str, ...]
    """FQNs that are units, in the same order."""

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(fqn for fqn in self.expected if fqn not in set(self.wrapped))

    @property
    def unexpected(self) -> tuple[str, ...]:
        return tuple(fqn for fqn in self.wrapped if fqn not in set(self.expected))

    @property
    def is_met(self) -> bool:
        return not self.missing and not self.unexpected

    def __bool__(self) -> bool:
        return self.is_met

    def __str__(self) -> str:
        parts = [
            f"{len(fqns)} {what}: {', '.join(fold_fqns(fqns))}"
            for what, fqns in (
                ("not wrapped, although the policy wraps them", self.missing),
                ("wrapped, although the policy does not wrap them", self.unexpected),
            )
            if fqns
        ]
        return "; ".join(parts) or f"all {len(self.expected)} expected modules are wrapped"


def expect_units(model: nn.Module | Sequence[nn.Module], policy: Any) -> WrapExpectation:
    """Compare the units of `model`, or its parts, with those that an auto-wrap policy makes."""
    visit = visit_modules(model)
    tree = capture_tree(model)
    roots = {index for index, node in enumerate(visit.nodes) if node.parent is None}
    chosen = _chosen(visit, tree.parameters, model, policy) - roots
    units = {module for unit in tree.units for module in unit.modules} - roots
    order = list(_post_order(visit))
    return WrapExpectation(
        expected=tuple(tree.module_fqn(index) for index in order if index in chosen),
        wrapped=tuple(tree.module_fqn(index) for index in order if index in units),
    )


def _chosen(
    visit: Visit, parameters: Any, model: nn.Module | Sequence[nn.Module], policy: Any
) -> set[int]:
    if isinstance(policy, (set, frozenset)):
        policy = ModuleWrapPolicy(policy)
    # Policy objects share this method (torch.distributed.fsdp.wrap._Policy, same in torch
    # 2.7, 2.13 and 2.15); callables are run as _recursive_wrap does.
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
    return _run_callable(visit, parameters, policy)


def _run_callable(visit: Visit, parameters: Any, policy: Callable[..., bool]) -> set[int]:
    """Decide as ``torch.distributed.fsdp.wrap._recursive_wrap``, without its recursion."""
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
    # Children come after their parents, so this order has seen all of them.
    for index in reversed(entered):
        rest = numels[index] - wrapped_inside[index]
        module = visit.modules[index]
        parent = visit.nodes[index].parent
        if parent is None:
            continue
        if policy(module=module, recurse=False, nonwrapped_numel=rest):
            chosen.add(index)
            wrapped_inside[index] = numels[index]
        wrapped_inside[parent] += wrapped_inside[index]
    return chosen


def _post_order(visit: Visit) -> Iterator[int]:
    above: list[int] = []
    for index, node in enumerate(visit.nodes):
        while len(above) > node.depth:
            yield above.pop()
        above.append(index)
    yield from reversed(above)
