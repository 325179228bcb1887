"""Groups of simulated ranks that run: the whole numbers that they send to each other arrive."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.gathering import TextStore
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.operations import Operation
from pytest_fsdp_comm.simulation.mirror import parts_for_each, reduction

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
        return [own for given in parts for own in given]
    if kind in {"all_to_all", "scatter"}:
        return [given[rank] for given in parts]
    reduced = reduction(bound)
    if kind == "all_reduce" and reduced is not None:
        return [reduced[0](torch.stack(own)).to(own[0].dtype) for own in zip(*parts, strict=True)]
    return None
