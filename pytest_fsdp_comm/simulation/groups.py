"""Other ranks of a simulation: what a collective brings of them, and which of them differ.

Along real axes the whole numbers that ranks send to each other arrive. Of all other groups the
result is that of peers which hold what this rank holds.
"""

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
from pytest_fsdp_comm.recording.operations import Operation, reduce_op

_tests: Final = itertools.count()
_meshes: Final[set[str | None]] = set()
"""The axes of all meshes that the process has made, None if one names none."""


class RealGroups:
    """What this rank exchanges with those that differ from it in real axes alone."""

    def __init__(
        self, axes: Mapping[str, tuple[int, int]], peers: Sequence[int], texts: TextStore
    ) -> None:
        """Begin a test, which all `peers` begin; `axes` by name with size and stride."""
        self._axes = axes
        self._peers = frozenset(peers)
        self._texts = texts
        self._test = next(_tests)
        self._counts: Counter[str] = Counter()

    def has(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks of a group run, and others than this one."""
        return group.size() > 1 and self._peers.issuperset(dist.get_process_group_ranks(group))

    def check(self, mesh: DeviceMesh) -> None:
        """Raise FsdpCommError if a mesh has a real axis of another size or stride."""
        _meshes.update(mesh.mesh_dim_names or (None,))
        for place, name in enumerate(mesh.mesh_dim_names or ()):
            line = mesh.mesh.movedim(place, -1).reshape(-1, mesh.shape[place])[0].tolist()
            given, found = self._axes.get(name), (len(line), line[-1] - line[-2] if line[1:] else 0)
            if given is not None and len(line) > 1 and found != given:
                raise FsdpCommError(
                    f"expected axis {name!r} of a mesh to have size {given[0]} and stride "
                    f"{given[1]}, as real= says, got size {found[0]} and stride {found[1]}: write "
                    f"real={{{name!r}: {found}}}, or give the mesh the axis as it is there"
                )

    def check_used(self) -> None:
        """Raise FsdpCommError if there are meshes, and none has some real axis."""
        __tracebackhide__ = True
        unused = sorted({*self._axes} - _meshes)
        # Groups made by hand, and axes without a name, may be meant.
        if unused and _meshes and None not in _meshes:
            raise FsdpCommError(
                f"expected a mesh with each axis of real=, got none with {', '.join(unused)}, only "
                f"with {', '.join(sorted(map(str, _meshes)))}: name it in real= as the mesh does, "
                "or drop it there"
            )

    def exchange(
        self,
        operation: Operation,
        group: dist.ProcessGroup,
        bound: Mapping[str, Any],
        sent: Sequence[torch.Tensor] | None,
    ) -> Callable[[], Sequence[torch.Tensor] | None] | None:
        """Send what is known, None if it is not; return what waits for what this rank receives.

        That gives the received elements in order, or None if they are unknown.
        """
        rank, kind = group.rank(), operation.kind
        if kind in {"send", "recv"}:
            peer = bound.get(operation.peer)
            if peer is None:
                raise FsdpCommError(
                    f"{find_call_site()} receives from any rank, and a simulation has no order in "
                    "which ranks come: name the rank that sends"
                )
            ends = (rank, peer) if kind == "send" else (peer, rank)
            key = self._next(f"{group.group_name}/{ends}/{bound['tag']}")
            if kind == "send":
                self._post(key, sent)
                return None
            return lambda: self._fetch(key)
        key = self._next(f"{group.group_name}")
        if kind == "all_to_all" and sent is not None:
            sent = parts_for_each(bound, sent, group.size())
        self._post(f"{key}/{rank}", sent)
        root = bound[operation.root] if operation.root else None

        def receive() -> Sequence[torch.Tensor] | None:
            ranks = range(group.size()) if root is None or kind == "gather" else [root]
            parts = [self._fetch(f"{key}/{number}") for number in ranks]
            known = [own for own in parts if own is not None]
            return _received(kind, bound, rank, known) if len(known) == len(parts) else None

        return receive

    def _next(self, what: str) -> str:
        self._counts[what] += 1
        return f"{what}/{self._counts[what]}"

    def _post(self, key: str, values: Sequence[torch.Tensor] | None) -> None:
        sent = [(str(own.dtype).removeprefix("torch."), own.tolist()) for own in values or ()]
        self._texts.put(f"{self._test}/{key}", json.dumps(None if values is None else sent))

    def _fetch(self, key: str) -> list[torch.Tensor] | None:
        parts: list[Any] | None = json.loads(self._texts.get(f"{self._test}/{key}"))
        if parts is None:
            return None
        return [torch.tensor(own, dtype=getattr(torch, name)) for name, own in parts]


def _received(
    kind: str, bound: Mapping[str, Any], rank: int, parts: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor] | None:
    if kind in {"all_gather", "gather", "broadcast"}:
        # Several at once are received one after the other, those of all ranks for each.
        rows = zip(*parts, strict=True) if "inputs" in bound else parts
        return [own for given in rows for own in given]
    if kind in {"all_to_all", "scatter"}:
        return [given[rank] for given in parts]
    reduced = reduction(bound)
    if kind == "all_reduce" and reduced is not None:
        return [reduced[0](torch.stack(own)).to(own[0].dtype) for own in zip(*parts, strict=True)]
    return None


_Reduction = tuple[
    Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, int], torch.Tensor]
]
_REDUCED: Final[Mapping[str | None, _Reduction]] = {
    "sum": (lambda parts: parts.sum(0), lambda own, size: own * size),
    "product": (lambda parts: parts.prod(0), lambda own, size: own**size),
    "min": (lambda parts: parts.amin(0), lambda own, _: own),
    "max": (lambda parts: parts.amax(0), lambda own, _: own),
    "avg": (lambda parts: parts.double().mean(0), lambda own, _: own),
    "band": (functools.partial(functools.reduce, torch.bitwise_and), lambda own, _: own),
    "bor": (functools.partial(functools.reduce, torch.bitwise_or), lambda own, _: own),
    "bxor": (
        functools.partial(functools.reduce, torch.bitwise_xor),
        lambda own, size: own * (size % 2),
    ),
}
"""By name, of what several ranks hold, stacked, and of what a number of ranks hold alike."""


def reduction(bound: Mapping[str, Any]) -> _Reduction | None:
    """The reduction that a call asks for; None if it is not known, or the call reduces nothing."""
    return _REDUCED.get(reduce_op(bound.get("reduce_op", bound.get("red_op"))))


def parts_for_each(
    bound: Mapping[str, Any], sent: Sequence[torch.Tensor], size: int
) -> Sequence[torch.Tensor]:
    """What an all-to-all sends to each rank of a group of `size`."""
    if len(sent) == size > 1:
        return sent
    return torch.split(sent[0], bound.get("input_split_sizes") or len(sent[0]) // size)


def mirrored(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, Any],
    sent: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The values of each output, from those that are sent; None for those that do not follow."""
    parts = _parts(kind, group, bound, sent, len(outputs))
    if not parts:
        return [None] * len(outputs)
    return [
        _filled(output, parts[place % len(parts)], group.size())
        for place, output in enumerate(outputs)
    ]


def _parts(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, Any],
    sent: Sequence[torch.Tensor],
    num_outputs: int,
) -> Sequence[torch.Tensor]:
    """What each output has once, or once for each rank, in turn; nothing if unknown."""
    rank, size = group.rank(), group.size()
    if kind in {"all_gather", "gather", "broadcast"}:
        return sent
    if kind == "all_to_all" and "gather_dim" not in bound:
        if len(sent) == size > 1:
            return [sent[rank]]
        part = parts_for_each(bound, sent, size)[rank]
        # Where parts of other sizes are awaited, peers hold something else.
        awaits = {*(bound.get("output_split_sizes") or [len(part)])}
        return [part.flatten().repeat(size)] if awaits == {len(part)} else ()
    reduced = reduction(bound)
    if reduced is None or kind not in {"all_reduce", "reduce_scatter"}:
        return ()
    if kind == "reduce_scatter":
        is_list = len(sent) != num_outputs
        sent = [sent[rank]] if is_list else [own.flatten().chunk(size)[rank] for own in sent]
    return [reduced[1](own, size) for own in sent]


def _filled(output: torch.Tensor, part: torch.Tensor, size: int) -> torch.Tensor | None:
    for times in (1, size):
        if part.numel() * times == output.numel():
            return part.flatten().repeat(times).view(output.shape).to(output.dtype)
    return None  # parts of unequal size, of which a peer holds others


# Note [Distinct ranks]
# FSDP pads what it shards, so along its own axis all ranks send the same, and one says it all. What
# is sharded before it, by tensor or expert parallelism, is registered as a parameter: if its size
# does not divide, some ranks keep less, and gather less. FSDP registers none (torch 2.7 to 2.15).


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
