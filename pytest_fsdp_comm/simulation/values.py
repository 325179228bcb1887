"""Tensors without memory, and what is known of their values."""

# Note [Known values]
# A small tensor that is computed from known values alone, such as positions or the sizes of parts,
# has its values beside it: each operation on it also runs on them, views and writes in place
# included, so that those of all its aliases follow. What is random, empty, a collective's result,
# or computed from such, is unknown. A write of something unknown takes the memory of the values
# away, and with it those of every alias.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.recording.active import entered
from pytest_fsdp_comm.recording.operations import NAMESPACES
from pytest_fsdp_comm.recording.owners.stack import find_call_site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_NUMEL: Final = 2**18
"""Of a tensor whose values are kept: 2 MiB of int64."""
_VALUES: Final = "_fsdp_comm_values"


class SimulationError(FsdpCommError):
    """Code of a simulated rank needs a value that nothing knows."""


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Have every tensor made without memory. See Note [Known values]."""

    def __init__(self, *, answers: bool) -> None:
        """Prepare to answer for some unknown values, or to refuse for all."""
        # What a test module has made before has memory; it counts as known.
        super().__init__(allow_non_fake_inputs=True)
        self._answers = answers

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation without its numbers, and with those that are known."""
        kwargs = kwargs or {}
        given = [own for own in tree_leaves((args, kwargs)) if isinstance(own, torch.Tensor)]
        is_known = not _is_made_up(func) and all(map(_is_known, given))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not is_known:
                return self._answer(func, args, kwargs)
            found = func(*_values(args), **_values(kwargs))
            result = tree_map_only(torch.Tensor, self.from_tensor, found)
            _keep(_made(result), found)
            return result
        if is_known and all(own.numel() <= _MAX_NUMEL for own in _made(result)):
            _keep(_made(result), func(*_values(args), **_values(kwargs)))
        elif given and isinstance(func, OpOverload) and func._schema.is_mutable:
            _forget(func, args, kwargs)
        return result

    def _answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | float:
        name = func.overloadpacket.__name__
        dtype = torch.bool if name == "equal" else args[0].dtype
        # A made-up count would decide shapes. A number or a truth rarely decides what is sent.
        is_answered = dtype.is_floating_point or dtype == torch.bool
        if not (self._answers and is_answered and name in {"_local_scalar_dense", "equal"}):
            what = "item" if name == "_local_scalar_dense" else name
            raise SimulationError(
                f"{find_call_site()} reads values of a tensor ({what}), which a simulated rank "
                "does not have: let a number of the configuration decide in its place, or run the "
                "test on real ranks, without simulate="
            )
        for recorder in entered():
            recorder.note_read(func, args, kwargs)
        return False if dtype == torch.bool else 1.0


def _made(result: Any) -> list[FakeTensor]:
    return [own for own in tree_leaves(result) if isinstance(own, FakeTensor)]


def _is_made_up(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace in NAMESPACES:
        return True
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._opname


def _is_known(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, FakeTensor):
        return tensor.numel() <= _MAX_NUMEL and type(tensor) is torch.Tensor
    values = tensor.__dict__.get(_VALUES)
    return values is not None and (not values.numel() or values.untyped_storage().nbytes() > 0)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that is known; the tensor itself if they are not."""
    if isinstance(tensor, FakeTensor):
        return tensor.__dict__[_VALUES] if _is_known(tensor) else tensor
    return tensor


def _values(given: Any) -> Any:
    # Of a tensor with memory a copy: what is written to a simulated one must not reach it.
    return tree_map_only(
        torch.Tensor,
        lambda own: own.__dict__[_VALUES] if isinstance(own, FakeTensor) else own.clone(),
        given,
    )


def _keep(made: Sequence[FakeTensor], found: Any) -> None:
    values = [own for own in tree_leaves(found) if isinstance(own, torch.Tensor)]
    for own, value in zip(made, values, strict=True):
        setattr(own, _VALUES, value)


def _forget(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    named = {
        **dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)),
        **kwargs,
    }
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for own in tree_leaves(named.get(argument.name)):
                values = own.__dict__.pop(_VALUES, None) if isinstance(own, FakeTensor) else None
                if values is not None:
                    values.untyped_storage().resize_(0)
