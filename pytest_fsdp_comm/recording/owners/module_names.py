"""Fully qualified names of modules, without the segments that wrappers add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from pytest_fsdp_comm.errors import RecordingError, printable
from pytest_fsdp_comm.text.fqn import escape, natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable

WRAPPER_SEGMENTS: Final = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""Under which name FSDP1, torch.compile and activation checkpointing keep the module that they wrap
(same in torch 2.7, 2.13, 2.15; torch itself removes these segments from FQNs)."""


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def clean_fqn(name: str) -> str:
    """Remove wrapper segments from a dotted name."""
    if not any(segment in name for segment in WRAPPER_SEGMENTS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


class ModuleNames:
    """The FQN of each module below some roots."""

    def __init__(self, roots: Iterable[nn.Module], *, are_parts: bool = False) -> None:
        """Name all modules: those of further roots as ``@2``, those of parts as in their model."""
        # Not by the class of the root, which must not be part of a snapshot.
        self._names: dict[int, str] = {}
        self._roots = list(roots)
        self._are_parts = are_parts
        self.modules: list[nn.Module] = []
        """All of them, each once below each root: to list them takes long."""
        for number, root in enumerate(self._roots, start=1):
            prefix = "" if number == 1 or are_parts else f"@{number}"
            for name, module in _named_modules(root):
                joined = ".".join(filter(None, (prefix, name)))
                self._names.setdefault(id(module), joined)
                self.modules.append(module)

    def all_fqns(self) -> Iterable[str]:
        """The name of each module."""
        return self._names.values()

    def children(self) -> dict[str, dict[str, str]]:
        """The ways to the modules: FQN -> attribute -> FQN of the child."""
        ways: dict[str, dict[str, str]] = {}
        for number in range(1, len(self._roots) + 1):
            if number > 1 and not self._are_parts:
                ways.setdefault("", {})[f"@{number}"] = f"@{number}"
        for module in self.modules:
            parent = self._names[id(module)]
            # Also the second name of a shared module, which named_children() leaves out.
            for name, child in module._modules.items():
                below = self.fqn(child)
                if below is not None:
                    ways.setdefault(parent, {})[name] = below
        return ways

    def fqn(self, module: nn.Module | None) -> str | None:
        """The module's name; None for no module, or one that is below no root."""
        return None if module is None else self._names.get(id(module))

    def joined(self, modules: tuple[nn.Module, ...]) -> str | None:
        """The name of a unit of several modules, joined with ``+``; None if none has one."""
        if len(modules) == 1:
            return self.fqn(modules[0])
        names = [name for name in map(self.fqn, modules) if name is not None]
        # In natural order, since the order in which a user lists them sends the same.
        return "+".join(sorted(names, key=natural_key)) if names else None


def parts_of(model: object, *, given_to: str, otherwise: str = "") -> list[nn.Module]:
    """List the modules that a user gives: one, or a list of the parts of one model.

    The errors say what they were `given_to`, and what to do `otherwise`, which begins with a comma.
    """
    parts: list[Any] = [*model] if isinstance(model, Sequence) else [model]
    for part in parts:
        if isinstance(part, type) and issubclass(part, nn.Module):
            raise RecordingError(
                f"{given_to}(model) expects a torch.nn.Module, or a list of them, got the class "
                f"{printable(part.__name__)} itself; pass an instance{otherwise}"
            )
        if not isinstance(part, nn.Module):
            raise RecordingError(
                f"{given_to}(model) expects a torch.nn.Module, or a list of them, got "
                f"{printable(type(part).__name__)}; pass the model itself{otherwise}"
            )
    if not parts:
        raise RecordingError(
            f"{given_to}([]) has no module that names could be relative to; pass the modules that "
            f"this rank runs{otherwise}"
        )
    for place, part in enumerate(parts):
        others = (*parts[:place], *parts[place + 1 :])
        if any(part is module for other in others for module in other.modules()):
            raise RecordingError(
                f"{given_to}([...]) expects parts of one model that do not overlap, but one of "
                f"them, a {printable(type(part).__name__)}, is given twice or lies within another; "
                "leave it out"
            )
    common = _common_parameter(parts) if len(parts) > 1 else None
    if common is not None:
        raise RecordingError(
            f"{given_to}([...]) expects parts of one model, whose names differ, but two of them "
            f"have a parameter {escape(common)}; pass torch.nn.ModuleList([...]), which names its "
            "modules 0, 1 and so on"
        )
    return parts


def _common_parameter(parts: Iterable[nn.Module]) -> str | None:
    seen: set[str] = set()
    for part in parts:
        own = {
            f"{fqn}.{name}" if fqn else name
            for fqn, module in _named_modules(part)
            for name, _ in module.named_parameters(recurse=False)
        }
        if not seen.isdisjoint(own):
            return min(seen & own, key=natural_key)
        seen |= own
    return None


def _named_modules(root: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    # DDP's own segment is called "module", which may also be a user's name: only DDP's is removed.
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415  # loads torch.distributed

    named = [*root.named_modules()]
    ddp = [
        f"{name}.module" if name else "module"
        for name, module in named
        if isinstance(module, DistributedDataParallel)
    ]
    for name, module in named:
        shown = name
        for wrapped in reversed(ddp):
            if shown == wrapped or shown.startswith(wrapped + "."):
                # Both parts begin or end with the one dot that joins them, or are empty.
                outer = wrapped.removesuffix("module").removesuffix(".")
                inner = shown[len(wrapped) :].removeprefix(".")
                shown = f"{outer}.{inner}" if outer and inner else outer or inner
        yield clean_fqn(shown), module
