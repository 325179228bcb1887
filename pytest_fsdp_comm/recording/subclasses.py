"""Which tensor subclasses turn an operation into others. See Note [Subclasses pass through]."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Subclasses(dict[type, Dispatch]):
    """What each of the few classes that a mode is given makes of operations."""

    def __missing__(self, cls: type) -> Dispatch:
        """Look at a class that comes for the first time."""
        own: Any = getattr(cls, "__torch_dispatch__", None)
        if own is None or own is torch.Tensor.__torch_dispatch__ or issubclass(cls, _stand_ins()):
            found = Dispatch.NONE
        else:
            found = Dispatch.WRAPPER if _can_be_taken_apart(cls) else Dispatch.OPAQUE
        self[cls] = found
        return found


def is_dtensor_class(cls: type) -> bool:
    """Whether a class is DTensor itself, as CommDebugMode checks."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: see `_stand_ins`
    return module is not None and cls is module.DTensor


def is_dtensor(thing: object) -> bool:
    """Whether something is a DTensor, or of a class derived from it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)


def nbytes_held(tensor: torch.Tensor) -> int:
    """Bytes of a tensor or, of a wrapper, of what it holds, whatever dtype it says of itself."""
    return sum(held.numel() * held.element_size() for held in tensors_held(tensor))


def tensors_held(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of a tensor: itself or, of a wrapper, those that it holds."""
    if type(tensor) is torch.Tensor or not _can_be_taken_apart(type(tensor)):
        yield tensor
        return
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
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
