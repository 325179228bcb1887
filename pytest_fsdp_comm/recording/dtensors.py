"""How tensor subclasses such as DTensor run operations, and which redistributions communicate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.recording.private import FakeTensor, FunctionalTensor


class Dispatch(IntEnum):
    """How a tensor class runs an operation. If arguments mix classes, the highest value applies."""

    NONE = 0
    """The class runs the operation like a plain tensor."""
    OPAQUE = 1
    """The class implements the operation in code that dispatch modes may not see."""
    WRAPPER = 2
    """Like DTensor, the class runs the operation on inner tensors, where dispatch modes see it."""


@functools.cache
def dispatch_of(cls: type) -> Dispatch:
    """Return how a tensor class runs operations."""
    method: Any = getattr(cls, "__torch_dispatch__", None)
    if method is None or method is torch.Tensor.__torch_dispatch__:
        return Dispatch.NONE
    if issubclass(cls, (FakeTensor, FunctionalTensor)):  # they work only inside their own modes
        return Dispatch.NONE
    return Dispatch.WRAPPER if _has_tensor_flatten(cls) else Dispatch.OPAQUE


def unwrap_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside a wrapper, at any depth; yield any other tensor unchanged."""
    if type(tensor) is torch.Tensor or not _has_tensor_flatten(type(tensor)):
        yield tensor
        return
    wrapper: Any = tensor
    try:
        names, _ = wrapper.__tensor_flatten__()
    except RuntimeError:
        names = vars(wrapper)  # flattening reads a value, which a simulated tensor lacks
    for inner in (getattr(wrapper, name) for name in names):
        if isinstance(inner, torch.Tensor):  # torch 2.13 lists the mesh of a DTensor too
            yield from unwrap_tensors(inner)


def _has_tensor_flatten(cls: type) -> bool:
    # torch.compile requires these methods of wrappers (torch 2.1 and newer).
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


class RedistributionWatch:
    """Detect the first collective of each DTensor redistribution."""

    def __init__(self, groups: GroupNames) -> None:
        self._groups = groups
        # torch keeps the steps of a redistribution in a list. We recognise a redistribution by its
        # list, because the address of its frame may be reused. Equal redistributions share a list,
        # so we also store the step: if it does not increase, a new redistribution has begun.
        self.last: tuple[Any, int] | None = None
        """List and step of the redistribution that issued the last collective; None if none did."""

    def describe_new_redistribution(self, variables: Mapping[str, Any]) -> dict[str, object] | None:
        """Return the fields of a `Redistribution` at its first collective, else None."""
        # `variables` are the locals of torch's redistribute_local_tensor.
        try:
            current, target = variables["current_spec"], variables["target_spec"]
            local = variables["local_tensor"]
        except KeyError as missing:
            raise upstream.misread_error("torch", "redistribute_local_tensor", missing) from missing
        self._groups.learn_mesh(current.mesh)
        infos = variables.get("optimized_transform_infos", variables.get("transform_infos", []))
        info, step = variables.get("transform_info"), 0
        if len(infos) > 1:
            step = next((n for n, entry in enumerate(infos) if entry is info), 0)
        last, self.last = self.last, (infos, step)
        if last is not None and last[0] is infos and step > last[1]:
            return None
        names = current.mesh.mesh_dim_names or ()
        return {
            "source_placements": tuple(map(repr, current.placements)),
            "target_placements": tuple(map(repr, target.placements)),
            "mesh_axes": tuple(map(printable, names)),
            # Sum over inner tensors: a wrapper may report a different dtype.
            "nbytes": sum(inner.numel() * inner.element_size() for inner in unwrap_tensors(local)),
        }
