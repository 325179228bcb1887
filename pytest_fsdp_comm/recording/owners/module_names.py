"""FQNs of modules, without the segments that wrappers add."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm.errors import RecordingError, printable
from pytest_fsdp_comm.text.fqn import escape, natural_key

Modules = tuple[nn.Module, ...]

WRAPPER_SEGMENTS: Final = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""The names under which FSDP1, torch.compile and activation checkpointing register the module that
they wrap (the same in torch 2.7, 2.13, 2.15; torch removes these segments from FQNs too)."""


def find_replicating_group(layer: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which DDP or `replicate` replicates a module; None if neither does."""
    if isinstance(layer, DistributedDataParallel):
        group: dist.ProcessGroup = layer.process_group
        return group
    # `replicate` swaps the class for a subclass of this `DDP`, and creates the real DDP only in the
    # first forward (the same in torch 2.7, 2.13, 2.15). Look in sys.modules, because the package
    # exports a function with the same name as the module.
    module: Any = sys.modules.get("torch.distributed._composable.replicate")
    if module is None or not isinstance(layer, module.DDP):
        return None
    state = module.replicate.state(layer)
    explicit_group = (state._init_kwargs or {}).get("process_group")
    ddp = getattr(state, "_ddp", None)
    return explicit_group or (dist.group.WORLD if ddp is None else ddp.process_group)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called, unlike a ModuleList."""
    # Look at the instance too, because TorchScript modules store their `forward` there.
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in module.__dict__


def clean_fqn(name: str) -> str:
    """Return a dotted name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def make_debug_name(root: nn.Module, path: str) -> str:
    """Return CommDebugMode's name for a module below a root."""
    kind, fqn = type(root).__name__, clean_fqn(path)
    return f"{kind}.{fqn}" if fqn else kind


class ModuleNames:
    """The FQNs of all modules below some roots, which may be parts of one model."""

    def __init__(self, roots: Iterable[nn.Module], *, are_parts: bool = False) -> None:
        """Name all modules; names below a second root start with ``@2``, unless `are_parts`."""
        # Use a number instead of the root's class: renaming a class must not change snapshots.
        self.by_id: dict[int, str] = {}
        """FQNs, keyed by the module's id."""
        self.by_path: dict[str, str] = {}
        """FQNs, keyed by the module's name with all wrapper segments."""
        self.modules: list[nn.Module] = []
        """All modules, once for each root that contains them; cached because listing is slow."""
        self.debug_names: dict[int, str] = {}
        """CommDebugMode's names, keyed by the module's id."""
        for number, root in enumerate(roots, start=1):
            prefix = "" if number == 1 or are_parts else f"@{number}"
            named = [*root.named_modules()]
            fqns, paths = _strip_wrappers(named), [path for path, _ in named]
            if prefix:
                fqns, paths = (
                    [f"{prefix}.{n}" if n else prefix for n in names] for names in (fqns, paths)
                )
            ids = [id(module) for _, module in named]
            # A module below two roots gets its name from the first.
            self.by_id = {**dict(zip(ids, fqns, strict=True)), **self.by_id}
            for path, module in named:
                self.debug_names.setdefault(id(module), make_debug_name(root, path))
            self.modules += [module for _, module in named]
            self.by_path |= zip(paths, map(self.by_id.__getitem__, ids), strict=True)

    def fqn(self, module: nn.Module | None) -> str | None:
        """Return a module's FQN; None for None, or for a module outside all roots."""
        return None if module is None else self.by_id.get(id(module))

    def join_fqns(self, modules: tuple[nn.Module, ...]) -> str | None:
        """Return the FQNs of a unit's modules, joined with ``+``; None if no module has an FQN."""
        if len(modules) == 1:
            return self.fqn(modules[0])
        names = [name for name in map(self.fqn, modules) if name is not None]
        # Sort, so that snapshots do not depend on the order in which the user lists the modules.
        return "+".join(sorted(names, key=natural_key)) if names else None


def read_model_parts(model: object, *, given_to: str, otherwise: str = "") -> list[nn.Module]:
    """Return the modules that a user passed to the function `given_to`: a model, or its parts."""
    # Error texts end with `otherwise`, which suggests an alternative and begins with a comma.
    parts: list[Any] = [*model] if isinstance(model, Sequence) else [model]
    for part in parts:
        if not isinstance(part, nn.Module):
            got = f"{printable(type(part).__name__)}; pass the model itself"
            if isinstance(part, type) and issubclass(part, nn.Module):
                got = f"the class {printable(part.__name__)} itself; pass an instance"
            if isinstance(part, Mapping):
                got = f"a {printable(type(part).__name__)}; pass torch.nn.ModuleDict(...)"
            raise RecordingError(
                f"{given_to}(model) expects a torch.nn.Module, or a list of them, got "
                f"{got}{otherwise}"
            )
    if not parts:
        raise RecordingError(
            f"{given_to}([]) got an empty list; pass the modules that this rank runs{otherwise}"
        )
    for index, part in enumerate(parts):
        others = (*parts[:index], *parts[index + 1 :])
        if any(part is module for other in others for module in other.modules()):
            raise RecordingError(
                f"{given_to}([...]) expects parts of one model that do not overlap, but one of "
                f"them, a {printable(type(part).__name__)}, is passed twice or lies within another;"
                " leave it out"
            )
    duplicate = _find_duplicate_fqn(parts) if len(parts) > 1 else None
    if duplicate is not None:
        raise RecordingError(
            f"{given_to}([...]) expects parts of one model without common parameter names, but two "
            f"of them have a parameter named {escape(duplicate)}; pass several models as "
            f'{given_to}(torch.nn.ModuleDict({{"actor": actor, "critic": critic}})), which '
            "prefixes their names"
        )
    return parts


def _find_duplicate_fqn(parts: Iterable[nn.Module]) -> str | None:
    earlier: set[str] = set()
    for part in parts:
        named = [*part.named_modules()]
        names = {
            f"{fqn}.{name}" if fqn else name
            for (_, module), fqn in zip(named, _strip_wrappers(named), strict=True)
            for name, _ in module.named_parameters(recurse=False)
        }
        if not earlier.isdisjoint(names):
            return min(earlier & names, key=natural_key)
        earlier |= names
    return None


def _strip_wrappers(named: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Return the names without the segments that wrappers add."""
    # DDP's segment is "module", a name that users may also choose, so check the types.
    wrappers = [name for name, module in named if isinstance(module, DistributedDataParallel)]
    ddp = [f"{name}.module" if name else "module" for name in wrappers]
    return [clean_fqn(_strip_ddp_segments(name, ddp)) for name, _ in named]


def _strip_ddp_segments(name: str, ddp: Sequence[str]) -> str:
    for wrapped in reversed(ddp):
        if name == wrapped or name.startswith(wrapped + "."):
            outer = wrapped.removesuffix("module").removesuffix(".")
            inner = name[len(wrapped) :].removeprefix(".")
            name = f"{outer}.{inner}" if outer and inner else outer or inner
    return name
