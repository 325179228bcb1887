"""Which ranks keep other shapes of a model's parameters than this one, by meshes and sizes."""

# Note [Distinct ranks]
# FSDP pads what it shards, so along its own axis all ranks send the same, and one says it all. What
# is sharded before it, by tensor or expert parallelism, is registered as a parameter: if its size
# does not divide, some ranks keep less, and gather less. FSDP registers none (torch 2.7 to 2.15).

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook


class DistinctRanks:
    """Collects a rank for each local shape that this one does not have."""

    def __init__(self) -> None:
        self.further: set[int] = set()
        """The other ranks."""
        self._seen: set[Any] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        hook = register_module_parameter_registration_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, name: str, parameter: Any) -> None:
        del module, name
        if not isinstance(parameter, DTensor):
            return
        mesh = parameter.device_mesh
        key = (mesh, tuple(parameter.shape), tuple(parameter.placements))
        own = mesh.get_coordinate()
        if key in self._seen or own is None:
            return
        self._seen.add(key)
        dims = [getattr(placement, "dim", None) for placement in parameter.placements]
        places = distinct_places(parameter.shape, tuple(mesh.shape), dims, own)
        with unset_fake_temporarily():
            ranks = {int(mesh.mesh[place]) for place in itertools.product(*places)}
            self.further |= ranks - {int(mesh.mesh[tuple(own)])}


def distinct_places(
    shape: Sequence[int], sizes: Sequence[int], dims: Sequence[int | None], own: Sequence[int]
) -> list[list[int]]:
    """The coordinates on each axis of a mesh of which one keeps each local shape.

    Args:
        shape: Of the whole parameter.
        sizes: Of the mesh.
        dims: What each axis shards; None if it replicates.
        own: The coordinates of this rank, which stands for those that keep the same.
    """
    lengths = [{length} for length in shape]
    places: list[list[int]] = []
    for size, dim, place in zip(sizes, dims, own, strict=True):
        others = {place}
        if dim is not None:
            kept = set()
            for length in lengths[dim]:
                chunk = -(-length // size)
                # The last that keeps a whole chunk, that keeps the rest, and the last of all.
                ends = {max(0, length // (chunk or 1) - 1), (length - 1) // (chunk or 1), size - 1}
                left = {end: max(0, min(chunk, length - end * chunk)) for end in (place, *ends)}
                others |= {end for end in ends if left[end] != left[place]}
                kept |= {*left.values()}
            lengths[dim] = kept
        places.append(sorted(others))
    return places
