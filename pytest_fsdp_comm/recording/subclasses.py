"""Which tensor subclasses turn an operation into others, and so may send something else."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_STAND_INS: Final = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
)


class Dispatch(IntEnum):
    """What a class makes of the operations that it is given; the higher one decides."""

    NONE = 0
    """Runs them as they are."""
    OPAQUE = 1
    """Has code of its own, of which nobody knows whether dispatch modes see what it runs."""
    WRAPPER = 2
    """Runs them on the tensors that it holds, where modes see them: DTensor, quantized tensors,
    collectives that nobody has waited for."""


class Subclasses:
    """Knows the classes that one mode was given, which are few, without asking twice."""

    def __init__(self) -> None:
        """Starts without a class: they are looked at when they come."""
        self._known: dict[type, Dispatch] = {}

    def dispatch(self, types: Iterable[type]) -> Dispatch:
        """What the classes of one operation's tensors make of it.

        Args:
            types: As a dispatch mode is given them.
        """
        found = Dispatch.NONE
        for cls in types:
            known = self._known.get(cls)
            if known is None:
                known = self._known[cls] = _dispatch_of(cls)
            found = max(found, known)
        return found


def is_dtensor_class(cls: type) -> bool:
    """Whether a class is DTensor itself, as CommDebugMode asks."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: see `_stand_ins`
    return module is not None and cls is module.DTensor


def is_dtensor(thing: object) -> bool:
    """Whether something is a DTensor, or of a class derived from it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(thing, module.DTensor)


def nbytes_held(tensor: torch.Tensor) -> int:
    """Bytes of a tensor or, of a wrapper, of what it holds, whatever dtype it says of itself."""
    if not _can_be_taken_apart(type(tensor)):
        return tensor.numel() * tensor.element_size()
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return sum(nbytes_held(getattr(wrapper, name)) for name in names)


def _dispatch_of(cls: type) -> Dispatch:
    own: Any = getattr(cls, "__torch_dispatch__", None)
    if own is None or own is torch.Tensor.__torch_dispatch__ or issubclass(cls, _stand_ins()):
        return Dispatch.NONE
    return Dispatch.WRAPPER if _can_be_taken_apart(cls) else Dispatch.OPAQUE


def _can_be_taken_apart(cls: type) -> bool:
    # What torch.compile asks of a class (torch 2.1 and newer).
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _stand_ins() -> tuple[type, ...]:
    """Classes of torch that stand for plain tensors, and fail if a mode does not run them.

    Not imported: where nothing has made a tensor of them, there is none.
    """
    modules = ((sys.modules.get(module), name) for module, name in _STAND_INS)
    return tuple(getattr(module, name) for module, name in modules if module is not None)
