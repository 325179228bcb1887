"""Find the owner of what DDP's reducer sends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

Modules = tuple["nn.Module", ...]


def replicated_over(layer: nn.Module) -> dist.ProcessGroup | None:
    """The group over which a module is replicated; None if it is not."""
    if isinstance(layer, DistributedDataParallel):
        found: dist.ProcessGroup = layer.process_group
        return found
    # `replicate` swaps the class for a subclass of this DDP, and makes the real DDP in the first
    # forward only (same in torch 2.7, 2.13, 2.15). By its name in sys.modules: the package exports
    # a function under the module's name.
    module: Any = sys.modules.get("torch.distributed._composable.replicate")
    if module is None or not isinstance(layer, getattr(module, "DDP", ())):
        return None
    state = module.replicate.state(layer)
    given = (state._init_kwargs or {}).get("process_group")
    ddp = getattr(state, "_ddp", None)
    return given or (dist.group.WORLD if ddp is None else ddp.process_group)


class ReplicaOwners:
    """The replicated modules below the roots of a recording."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        """Find them, below the roots that the recorder found."""
        self._fallback: Modules = tuple(roots[:1])
        self._owner_of: dict[int, nn.Module] = {}
        self._replicas: list[nn.Module] = []
        for root in roots:
            # Parents come first, so that an inner replica overrides the outer one.
            for module in root.modules():
                if replicated_over(module) is not None:
                    self._replicas.append(module)
                    self._owner_of.update((id(child), module) for child in module.modules())

    def owner(self, running: Modules) -> Modules:
        """Find the replicated module around `running`; else the first of the model, or its root."""
        known = [self._owner_of[id(module)] for module in running if id(module) in self._owner_of]
        return tuple((known or self._replicas)[:1]) or self._fallback
