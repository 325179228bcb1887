"""Finds the owner of what DDP's reducer sends, and the module of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fsdp_comm.capture.shards_ddp import replicated_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

Modules = tuple["nn.Module", ...]


class ReplicaOwners:
    """The replicated modules below the roots of a recording."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        """Looks for them.

        Args:
            roots: As `recorder.Recorder` found them.
        """
        self._fallback: Modules = tuple(roots[:1])
        self._owner_of: dict[int, nn.Module] = {}
        self._replicas: list[nn.Module] = []
        for root in roots:
            # Parents come first, so that an inner replica takes its modules over.
            for module in root.modules():
                if replicated_over(module) is not None:
                    self._replicas.append(module)
                    self._owner_of.update((id(child), module) for child in module.modules())

    def owner(self, running: Modules) -> Modules:
        """The replicated module that a collective serves.

        Args:
            running: The module of the parameter that completed the bucket; empty if unknown.

        Returns:
            The innermost replicated module around it. If there is none, the first one of the model,
            and the root of a model without any.
        """
        for module in running:
            found = self._owner_of.get(id(module))
            if found is not None:
                return (found,)
        return tuple(self._replicas[:1]) or self._fallback


class ParameterOwners:
    """Finds the module that registered a parameter, in backward hooks of parameters."""

    def __init__(self, roots: list[nn.Module]) -> None:
        """Knows none yet.

        Args:
            roots: The recorder's list, which may still grow.
        """
        self._roots = roots
        self._found: dict[int, nn.Module | None] = {}

    def module_of(self, parameter: torch.Tensor) -> nn.Module | None:
        """The first module that registered the parameter; None if none did."""
        if id(parameter) not in self._found:
            for root in self._roots:
                for module in root.modules():
                    for own in module.parameters(recurse=False):
                        self._found.setdefault(id(own), module)
            # Remembered too, so that a foreign parameter costs one search only.
            self._found.setdefault(id(parameter), None)
        return self._found[id(parameter)]
