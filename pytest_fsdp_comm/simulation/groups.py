"""Provides the values that a simulated rank receives; finds ranks with different local shapes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.gathering import TextStore
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.operations import Operation, read_reduce_op
from pytest_fsdp_comm.simulation.memory import SimulationError

_tests: Final = itertools.count()
_meshes: Final[set[str | None]] = set()
"""Names of the axes of all simulated meshes; includes None if a mesh has no axis names."""


class RealGroups:
    """Exchanges values with the peers along the axes of ``real=``, which run in other processes."""

    def __init__(
        self, axes: Mapping[str, tuple[int, int]], peers: Sequence[int], texts: TextStore
    ) -> None:
        """Begin a test; `peers` includes this rank, and `axes` maps names to size and stride."""
        self._axes = axes
        self._peers = frozenset(peers)
        self._texts = texts
        self._test = next(_tests)
        self._counts: Counter[str] = Counter()

    def has_ranks_of(self, group: dist.ProcessGroup) -> bool:
        """Return whether a group has several ranks, all of which run in this test."""
        return group.size() > 1 and self._peers.issuperset(dist.get_process_group_ranks(group))

    def check_mesh(self, mesh: DeviceMesh) -> None:
        """Raise SimulationError if an axis of the mesh differs from ``real=`` in size or stride."""
        _meshes.update(mesh.mesh_dim_names or (None,))
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            ranks = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim])[0].tolist()
            expected = self._axes.get(name)
            actual = (len(ranks), ranks[-1] - ranks[-2] if ranks[1:] else 0)
            if expected is not None and len(ranks) > 1 and actual != expected:
                raise SimulationError(
                    f"expected axis {name!r} of a mesh to have size {expected[0]} and stride "
                    f"{expected[1]}, as in real=, got size {actual[0]} and stride {actual[1]}: "
                    f"write real={{{name!r}: {actual}}}, or change the mesh"
                )

    def check_axes_exist(self) -> None:
        """Raise FsdpCommError if ``real=`` names an axis that no mesh has."""
        __tracebackhide__ = True
        unused = sorted({*self._axes} - _meshes)
        # Do not raise without a mesh, or if a mesh has unnamed axes: the axis in ``real=`` may be a
        # process group outside any mesh, or one of the unnamed axes.
        if unused and _meshes and None not in _meshes:
            raise FsdpCommError(
                f"real= contains {', '.join(unused)}, but the only mesh axes are "
                f"{', '.join(sorted(map(str, _meshes)))}: rename or remove unknown axes in real="
            )

    def exchange(
        self,
        operation: Operation,
        group: dist.ProcessGroup,
        bound: Mapping[str, object],
        sent: Sequence[torch.Tensor] | None,
    ) -> Callable[[], Sequence[torch.Tensor] | None] | None:
        """Send this rank's values (None if unknown) to its peers.

        Return a function that waits for the peers' values and returns them, or None if they are
        unknown. If this rank receives nothing, return None instead of a function.
        """
        rank, kind = group.rank(), operation.kind
        if kind in {"send", "recv"}:
            peer = bound.get(operation.peer)
            if peer is None:
                raise SimulationError(
                    f"{find_call_site()} receives from any rank, but a simulation does not "
                    "know which rank sends first: pass the source rank"
                )
            ends = (rank, peer) if kind == "send" else (peer, rank)
            key = self._make_numbered_key(f"{group.group_name}/{ends}/{bound['tag']}")
            if kind == "send":
                self._post_values(key, sent)
                return None
            return lambda: self._fetch_values(key)
        key = self._make_numbered_key(f"{group.group_name}")
        if kind == "all_to_all" and sent is not None:
            sent = split_for_each_rank(bound, sent, group.size())
        self._post_values(f"{key}/{rank}", sent)
        root = bound[operation.root] if operation.root else None

        def receive() -> Sequence[torch.Tensor] | None:
            ranks = range(group.size()) if root is None or kind == "gather" else [root]
            parts = [self._fetch_values(f"{key}/{number}") for number in ranks]
            values = [part for part in parts if part is not None]
            return (
                _compute_received(kind, bound, rank, values) if len(values) == len(parts) else None
            )

        return receive

    def _make_numbered_key(self, key: str) -> str:
        self._counts[key] += 1
        return f"{key}/{self._counts[key]}"

    def _post_values(self, key: str, values: Sequence[torch.Tensor] | None) -> None:
        sent = [(str(value.dtype).removeprefix("torch."), value.tolist()) for value in values or ()]
        self._texts.put(f"{self._test}/{key}", json.dumps(None if values is None else sent))

    def _fetch_values(self, key: str) -> list[torch.Tensor] | None:
        parts: list[Any] | None = json.loads(self._texts.get(f"{self._test}/{key}"))
        if parts is None:
            return None
        return [torch.tensor(data, dtype=getattr(torch, name)) for name, data in parts]


def _compute_received(
    kind: str, bound: Mapping[str, object], rank: int, parts: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor] | None:
    if kind in {"all_gather", "gather", "broadcast"}:
        # A coalesced call orders its outputs by tensor, then by rank.
        rows = zip(*parts, strict=True) if "inputs" in bound else parts
        return [value for row in rows for value in row]
    if kind in {"all_to_all", "scatter"}:
        return _join_shards(bound, [row[rank] for row in parts])
    reduced = find_reduction(bound)
    if kind == "all_reduce" and reduced is not None:
        by_tensor = zip(*parts, strict=True)
        return [reduced[0](torch.stack(values)).to(values[0].dtype) for values in by_tensor]
    return None


_Reduction = tuple[
    Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, int], torch.Tensor]
]
_REDUCED: Final[Mapping[str | None, _Reduction]] = {
    "sum": (lambda parts: parts.sum(0), lambda value, size: value * size),
    "product": (lambda parts: parts.prod(0), lambda value, size: value**size),
    "min": (lambda parts: parts.amin(0), lambda value, _: value),
    "max": (lambda parts: parts.amax(0), lambda value, _: value),
    "avg": (lambda parts: parts.double().mean(0), lambda value, _: value),
    "band": (functools.partial(functools.reduce, torch.bitwise_and), lambda value, _: value),
    "bor": (functools.partial(functools.reduce, torch.bitwise_or), lambda value, _: value),
    "bxor": (
        functools.partial(functools.reduce, torch.bitwise_xor),
        lambda value, size: value * (size % 2),
    ),
}
"""For each reduction, two functions: the first reduces the stacked values of all ranks, the second
computes the result if `size` ranks send the same value."""


def find_reduction(bound: Mapping[str, object]) -> _Reduction | None:
    """Return the reduction of a call; None if it is unknown or the call does not reduce."""
    return _REDUCED.get(read_reduce_op(bound.get("reduce_op", bound.get("red_op"))))


def split_for_each_rank(
    bound: Mapping[str, Any], sent: Sequence[torch.Tensor], size: int
) -> Sequence[torch.Tensor]:
    """Split the input of an all-to-all into one part for each of the group's `size` ranks."""
    if len(sent) == size > 1:
        return sent
    if "shard_dim" in bound:  # a DTensor changes the dimension that it shards
        return sent[0].chunk(size, bound["shard_dim"])
    return torch.split(sent[0], bound.get("input_split_sizes") or len(sent[0]) // size)


def _join_shards(bound: Mapping[str, Any], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join the parts that a DTensor receives as its new shard; return other parts as they are."""
    return [torch.cat(parts, bound["gather_dim"])] if "gather_dim" in bound else parts


def mirror_outputs(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, object],
    sent: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Compute outputs as if all peers sent this rank's values; an unknown output is None."""
    parts = _make_mirrored_parts(kind, group, bound, sent, len(outputs))
    if not parts:
        return [None] * len(outputs)
    return [
        _repeat_part_to_fit(output, parts[index % len(parts)], group.size())
        for index, output in enumerate(outputs)
    ]


def _make_mirrored_parts(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, Any],
    sent: Sequence[torch.Tensor],
    num_outputs: int,
) -> Sequence[torch.Tensor]:
    """Return the parts that fill the outputs, perhaps repeatedly; empty if they are unknown."""
    rank, size = group.rank(), group.size()
    if kind in {"all_gather", "gather", "broadcast"}:
        return sent
    if kind == "all_to_all":
        part = split_for_each_rank(bound, sent, size)[rank]
        return [part] if len(sent) == size > 1 else _mirror_exchange(bound, part, size)
    if kind not in {"all_reduce", "reduce_scatter"}:
        return ()
    reduced = find_reduction(bound)
    # torch before 2.11 does not tell which reduction it is, but each one of zeros is zero.
    if reduced is None and any(value.any() for value in sent):
        return ()
    if kind == "reduce_scatter":
        is_list = len(sent) != num_outputs
        sent = [sent[rank]] if is_list else [value.flatten().chunk(size)[rank] for value in sent]
    return [value if reduced is None else reduced[1](value, size) for value in sent]


def _mirror_exchange(
    bound: Mapping[str, Any], part: torch.Tensor, size: int
) -> Sequence[torch.Tensor]:
    if "gather_dim" in bound:
        return _join_shards(bound, [part] * size)
    # If this rank receives parts of a different size, its peers cannot send the same values.
    expected = {*(bound.get("output_split_sizes") or [len(part)])}
    return [part.flatten().repeat(size)] if expected == {len(part)} else ()


def _repeat_part_to_fit(output: torch.Tensor, part: torch.Tensor, size: int) -> torch.Tensor | None:
    for times in (1, size):
        if part.numel() * times == output.numel():
            return part.flatten().repeat(times).view(output.shape).to(output.dtype)
    return None  # the sizes do not match, so the peers do not send the same values


# FSDP pads its shards, so all ranks along an FSDP axis send the same number of bytes, and it is
# enough to simulate one of them. Tensor and expert parallelism shard before FSDP does and do not
# pad, so if a dimension does not divide evenly, some ranks have smaller shards and gather fewer
# bytes. `DistinctRanks` finds such ranks when a module registers a parameter: tensor and expert
# parallelism register their shards as parameters, but FSDP does not (torch 2.7 to 2.15).


class DistinctRanks:
    """Finds one rank for each local parameter shape that this rank does not have."""

    def __init__(self) -> None:
        self.further: set[int] = set()
        """Ranks whose local parameter shapes differ from this rank's."""
        self._parameters: set[Any] = set()

    @contextlib.contextmanager
    def watch_parameters(self) -> Iterator[None]:
        hook = register_module_parameter_registration_hook(self._add_ranks_of_other_shapes)
        try:
            yield
        finally:
            hook.remove()

    def _add_ranks_of_other_shapes(
        self, module: nn.Module, name: str, parameter: torch.Tensor
    ) -> None:
        del module, name
        if not isinstance(parameter, DTensor):
            return
        mesh = parameter.device_mesh
        key = (mesh, tuple(parameter.shape), tuple(parameter.placements))
        coordinate = mesh.get_coordinate()
        if key in self._parameters or coordinate is None:
            return
        self._parameters.add(key)
        dims = [getattr(placement, "dim", None) for placement in parameter.placements]
        coordinates = distinct_coordinates(parameter.shape, tuple(mesh.shape), dims, coordinate)
        with unset_fake_temporarily():
            ranks = {int(mesh.mesh[index]) for index in itertools.product(*coordinates)}
            self.further |= ranks - {int(mesh.mesh[tuple(coordinate)])}


def distinct_coordinates(
    shape: Sequence[int], sizes: Sequence[int], dims: Sequence[int | None], this: Sequence[int]
) -> list[list[int]]:
    """Return coordinates for each mesh axis; the ranks at these coordinates have all local shapes.

    Args:
        shape: Shape of the unsharded parameter.
        sizes: Size of each mesh axis.
        dims: The dimension that each axis shards; None for an axis that replicates.
        this: Coordinates of this rank, which the result always includes.
    """
    lengths = [{length} for length in shape]
    coordinates: list[list[int]] = []
    for size, dim, own in zip(sizes, dims, this, strict=True):
        distinct = {own}
        if dim is not None:
            local_lengths = set()
            for length in lengths[dim]:
                chunk = -(-length // size)
                # Three ranks are enough to cover every shard length: the last one with a full
                # chunk, the one with the remainder, and the very last one.
                ends = {max(0, length // (chunk or 1) - 1), (length - 1) // (chunk or 1), size - 1}
                local = {end: max(0, min(chunk, length - end * chunk)) for end in (own, *ends)}
                distinct |= {end for end in ends if local[end] != local[own]}
                local_lengths |= {*local.values()}
            lengths[dim] = local_lengths
        coordinates.append(sorted(distinct))
    return coordinates
