"""What DTensor and other tensor subclasses make of operations, and which redistributions send."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Final

import torch

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames

_STAND_INS: Final = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
)


class Dispatch(IntEnum):
    """What a class makes of the operations that it is given; the higher one decides."""

    NONE = 0
    """Runs them as they are, as a plain tensor does."""
    OPAQUE = 1
    """Has code of its own, and dispatch modes may not see what that runs."""
    WRAPPER = 2
    """Runs them on the tensors that it holds, where modes see them: DTensor, unwaited results."""


@functools.cache
def dispatch_of(cls: type) -> Dispatch:
    """What a class makes of operations."""
    own: Any = getattr(cls, "__torch_dispatch__", None)
    if own is None or own is torch.Tensor.__torch_dispatch__ or issubclass(cls, _stand_ins()):
        return Dispatch.NONE
    return Dispatch.WRAPPER if _can_be_taken_apart(cls) else Dispatch.OPAQUE


def is_dtensor_class(cls: type) -> bool:
    """Whether a class is DTensor itself, as CommDebugMode checks."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: see `_stand_ins`
    return module is not None and cls is module.DTensor


def is_dtensor(thing: object) -> bool:
    """Whether something is a DTensor, or of a class derived from it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)


def tensors_held(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a tensor: itself or, of a wrapper, those that it holds."""
    if type(tensor) is torch.Tensor or not _can_be_taken_apart(type(tensor)):
        yield tensor
        return
    wrapper: Any = tensor
    try:
        names, _ = wrapper.__tensor_flatten__()
    except RuntimeError:
        names = vars(wrapper)  # it reads a value, which a simulated tensor does not have
    for held in (getattr(wrapper, name) for name in names):
        if isinstance(held, torch.Tensor):  # torch 2.13 lists the mesh of a DTensor too
            yield from tensors_held(held)


def _can_be_taken_apart(cls: type) -> bool:
    # What torch.compile requires of a class (torch 2.1 and newer).
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _stand_ins() -> tuple[type, ...]:
    """Classes of torch in place of plain tensors, which fail if a mode does not run them."""
    # Not imported: where nothing has made a tensor of them, there is none.
    modules = ((sys.modules.get(module), name) for module, name in _STAND_INS)
    return tuple(getattr(module, name) for module, name in modules if module is not None)


class RedistributionWatch:
    """Notice the first collective of each redistribution."""

    def __init__(self, groups: GroupNames) -> None:
        self._groups = groups
        # The steps of the last collective's redistribution, and which it had reached. Held, and not
        # known by the frame, whose address the next one may have. Torch keeps one list for all that
        # are alike, but each begins at the same step.
        self.last: tuple[Any, int] | None = None
        """None once a collective was sent that is part of none."""

    def note_collective(self, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """Note a collective by the locals of the redistribution that it is part of.

        Returns:
            At its first collective, fields of `events.Redistribution`; None at any other.
        """
        try:
            # Read in torch 2.6, 2.9, 2.11, 2.13.
            current, target = found["current_spec"], found["target_spec"]
            local = found["local_tensor"]
        except KeyError as missing:
            raise upstream.misread_error("torch", "redistribute_local_tensor", missing) from missing
        self._groups.learn_mesh(current.mesh)
        infos = found.get("optimized_transform_infos", found.get("transform_infos", []))
        info, step = found.get("transform_info"), 0
        if len(infos) > 1:
            step = next((n for n, one in enumerate(infos) if one is info), 0)
        last, self.last = self.last, (infos, step)
        if last is not None and last[0] is infos and step > last[1]:
            return None
        names = current.mesh.mesh_dim_names or ()
        return {
            "source_placements": tuple(map(repr, current.placements)),
            "target_placements": tuple(map(repr, target.placements)),
            "mesh_axes": tuple(map(printable, names)),
            # Of what a wrapper holds, whatever dtype it says of itself.
            "nbytes": sum(held.numel() * held.element_size() for held in tensors_held(local)),
        }
