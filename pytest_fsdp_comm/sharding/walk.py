"""Visit every module of a model once, without recursion and without the wrappers' own segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm.errors import RecordingError, printable
from pytest_fsdp_comm.recording.owners.module_names import WRAPPER_SEGMENTS, has_forward, parts_of
from pytest_fsdp_comm.text.fqn import ROOT_TEXT, natural_key
from pytest_fsdp_comm.tree.model import ModuleNode

Slot = tuple[int, str]
"""Where a parameter is registered: index of the module, and its name there."""

_Registration = tuple[int, str]
"""What a module is registered in: ``id`` of its parent, and its name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The modules of one model, by index as in `pytest_fsdp_comm.tree.model.ShardTree.modules`."""

    nodes: tuple[ModuleNode, ...]
    modules: tuple[nn.Module, ...]
    wrappers: tuple[tuple[nn.Module, ...], ...]
    """The wrappers of each node, outermost first."""
    index_of: Mapping[int, int]
    """``id`` of a module or wrapper -> index of its node; aliases lead to the node they repeat."""

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each wrapper and module with its node's index, outermost first; aliases left out."""
        for index, node in enumerate(self.nodes):
            if node.alias_of is None:
                for layer in (*self.wrappers[index], self.modules[index]):
                    yield index, layer

    def slots(self, registrations: Iterable[tuple[nn.Module, str]]) -> tuple[Slot, ...]:
        """Where parameters are registered; registrations outside the tree are left out."""
        return tuple(
            (self.index_of[id(module)], name)
            for module, name in registrations
            if id(module) in self.index_of
        )

    def ancestors(self, index: int) -> Iterator[int]:
        parent = self.nodes[index].parent
        while parent is not None:
            yield parent
            parent = self.nodes[parent].parent


def visit_modules(model: object) -> Visit:
    """List the modules below `model` in registration order, parents first, part after part."""
    # A module that is registered several times has its children where natural order comes to it
    # first, so that the order of construction does not show; elsewhere it is an alias.
    roots = parts_of(model, given_to="fsdp_tree")
    primary = _primary_registrations(roots)
    nodes: list[ModuleNode] = []
    modules: list[nn.Module] = []
    all_wrappers: list[tuple[nn.Module, ...]] = []
    aliases: list[int] = []
    index_of: dict[int, int] = {}
    pending: list[tuple[nn.Module, int | None, str]] = [(root, None, "") for root in roots[::-1]]
    while pending:
        outer, parent, name = pending.pop()
        wrappers, inner = _unwrap(outer)
        index = len(nodes)
        if primary[id(inner)] == (0 if parent is None else id(modules[parent]), name):
            index_of.update((id(layer), index) for layer in (*wrappers, inner))
            pending += [(child, index, own) for own, child in reversed(_children(inner))]
        else:
            aliases.append(index)
        modules.append(inner)
        all_wrappers.append(wrappers)
        nodes.append(
            ModuleNode(
                name=name,
                parent=parent,
                depth=0 if parent is None else nodes[parent].depth + 1,
                class_name=class_name(inner),
                wrappers=tuple(map(class_name, wrappers)),
                has_forward=has_forward(inner),
            )
        )
    # Once the index of each module is known.
    for index in aliases:
        nodes[index] = replace(nodes[index], alias_of=index_of[id(modules[index])])
    return Visit(
        nodes=tuple(nodes), modules=tuple(modules), wrappers=tuple(all_wrappers), index_of=index_of
    )


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote."""
    # fully_shard and replicate swap a module's class for one that they make on the fly, as
    # type("FSDP" + name, (FSDPModule, user_class), {}) (same in torch 2.7, 2.13, 2.15).
    cls = type(module)
    while len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed."):
        cls = cls.__bases__[1]
    return printable(cls.__name__)


def _primary_registrations(roots: Sequence[nn.Module]) -> dict[int, _Registration]:
    """The first registration of each module, by its ``id``, in natural order."""
    primary: dict[int, _Registration] = {}
    pending: list[tuple[nn.Module, _Registration]] = [(root, (0, "")) for root in roots[::-1]]
    while pending:
        outer, registration = pending.pop()
        _, inner = _unwrap(outer)
        if id(inner) in primary:
            continue
        missing = [name for name in ("_modules", "_parameters") if name not in vars(inner)]
        if missing:
            raise RecordingError(
                f"fsdp_tree found a half-built module: {registration[1] or ROOT_TEXT} "
                f"({class_name(inner)}) has no {missing[0]}; call super().__init__() first in its "
                "__init__"
            )
        primary[id(inner)] = registration
        children = sorted(_children(inner), key=lambda child: natural_key(child[0]), reverse=True)
        pending += [(child, (id(inner), name)) for name, child in children]
    return primary


def _unwrap(module: nn.Module) -> tuple[tuple[nn.Module, ...], nn.Module]:
    wrappers: list[nn.Module] = []
    while True:
        children: dict[str, nn.Module | None] = module.__dict__.get("_modules", {})
        names = ("module",) if isinstance(module, DistributedDataParallel) else WRAPPER_SEGMENTS
        wrapped = next((children[name] for name in names if name in children), None)
        if wrapped is None:
            return tuple(wrappers), module
        wrappers.append(module)
        module = wrapped


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # Not named_children(): it leaves out a child that is registered twice.
    children = module.__dict__.get("_modules", {})
    return [(name, child) for name, child in children.items() if child is not None]
