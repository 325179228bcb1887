"""Follow what an optimizer's step computes from the tensors of one parameter."""

# Note [Arithmetic of a step]
# Muon and Shampoo send what they have computed, such as a gradient with momentum in bfloat16. So
# while such a step runs, and only then, a dispatch mode notes of which parameter the results of
# each operation are: of the one that all of its tensors are of. Single numbers (norms, rates) and
# constants made in the step belong to any, unknown tensors and those of two parameters make the
# result unknown. What comes from a gradient is one on its way to the parameter, whatever else
# goes in. Weak references keep an address from being used again, and no memory.
# torch's own elementwise optimizers send at most the tensors themselves, and run without the mode.

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm.comm.events import Role
from pytest_fsdp_comm.recording.active import InPlace, Shared, entered, in_place
from pytest_fsdp_comm.recording.operations import tensors_in
from pytest_fsdp_comm.recording.subclasses import Dispatch, Subclasses, is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Extent(NamedTuple):
    """Where a tensor lies."""

    storage: int
    start: int
    """In bytes from the start of the storage."""
    end: int


def extent_of(tensor: Any) -> Extent | None:
    """Where a plain tensor lies; None for an expanded one, and for one without storage."""
    if not has_bytes(tensor):
        return None
    itemsize, numel = tensor.element_size(), tensor.numel()
    if numel and not tensor.is_contiguous():
        pairs = [*zip(tensor.shape, tensor.stride(), strict=True)]
        if any(size > 1 and not stride for size, stride in pairs):
            return None
        numel = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = tensor.storage_offset() * itemsize
    return Extent(tensor.untyped_storage()._cdata, start, start + numel * itemsize)


def has_bytes(tensor: Any) -> bool:
    """Whether a tensor lies in a storage."""
    # A wrapper that nobody can take apart has none, nor has one of functorch.
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference that frees the bytes, and keeps the address from being used again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a tensor is."""

    parameter: torch.Tensor | None
    """Whose value, gradient or state; None if it may be that of several."""
    role: Role | None
    """None if it may be several."""


_CONSTANT: Final = Label(parameter=None, role=None)


class Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Label what is computed while it is entered. See Note [Arithmetic of a step]."""

    # As of the recorder's own mode.
    supports_higher_order_operators = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, held_at: Callable[[Extent], Label | None]
    ) -> None:
        """`held_at` says what the model and the optimizer hold."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer = optimizer
        self._held_at = held_at
        self._subclasses = Subclasses()
        # By the address of a storage, with what keeps the address.
        self._labels: dict[int, tuple[Any, Label | None]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and label what it has computed."""
        if any(self._subclasses[one] is not Dispatch.NONE for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is not None:
            given, written = (args, kwargs or {}), _written(schema, args, kwargs or {}, result)
            is_each = schema.name.startswith("aten::_foreach_")
            for inputs, outputs in _each(args, written) if is_each else [(given, written)]:
                self._carry([*tensors_in(inputs)], [*tensors_in(outputs)], schema.is_mutable)
        return result

    def label_at(self, extent: Extent) -> Label | None:
        """What was computed there."""
        _, label = self._labels.get(extent.storage, (None, None))
        return None if label is _CONSTANT else label

    def _carry(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], is_mutable: bool
    ) -> None:
        known = {one.untyped_storage()._cdata for one in inputs if extent_of(one)}
        label = self._computed(inputs)
        for output in outputs:
            extent = extent_of(output)
            # A view is what it was.
            if extent is not None and (is_mutable or extent.storage not in known):
                self._labels[extent.storage] = (weak_storage(output), label)

    def _computed(self, inputs: Iterable[torch.Tensor]) -> Label | None:
        labels = []
        for tensor in inputs:
            extent = extent_of(tensor)
            if tensor.numel() == 1:
                continue
            if extent is None:
                return None
            label = self._held_at(extent) or self._labels.get(extent.storage, (None, None))[1]
            if label is None:
                return None
            if label is not _CONSTANT:
                labels.append(label)
        if not labels:
            return _CONSTANT
        roles = {label.role for label in labels}
        sole = labels[0].role if len(roles) == 1 else None
        return Label(
            parameter=sole_parameter(labels),
            role=Role.GRADIENTS if Role.GRADIENTS in roles else sole,
        )


def sole_parameter(labels: list[Label]) -> torch.Tensor | None:
    """The parameter of all of them; None if they differ."""
    is_one = len({id(label.parameter) for label in labels}) == 1
    return labels[0].parameter if is_one else None


@Shared
@contextlib.contextmanager
def optimizers() -> Iterator[None]:
    """Have recordings told of each `step` or `zero_grad` of an optimizer."""
    # Both run in a profiler range (read in torch 2.6 to 2.13), which ends after an error too, as
    # the hooks of a step do not. And a global hook would make dynamo compile a step again.
    record = torch.autograd.profiler.record_function
    running: dict[int, contextlib.ExitStack] = {}
    leave = InPlace(record, "__exit__", _leave_range, running)
    # Nearly all ranges are FSDP's: how one ends is looked at while an optimizer's is under way.
    leaving = Shared(functools.partial(in_place, leave))

    def begin(own: Any, optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.Optimizer):
            around = running[id(own)] = contextlib.ExitStack()
            around.enter_context(leaving)
            for recorder in entered():
                around.enter_context(recorder.tensors.around(optimizer))

    enter = InPlace(record, "__enter__", _enter_range, sys._getframe, begin)
    # Python has found `__exit__` before it calls `__enter__`.
    with in_place(enter), leaving if leave.is_attribute else contextlib.nullcontext():
        yield


def _enter_range(own: Any, *, _fsdp_comm: Any) -> Any:
    original, getframe, begin = _fsdp_comm
    result = original(own)
    if own.name.startswith("Optimizer."):
        begin(own, getframe(1).f_locals.get("self"))
    return result


def _leave_range(own: Any, *error: Any, _fsdp_comm: Any) -> Any:
    original, running = _fsdp_comm
    if running and id(own) in running:
        running.pop(id(own)).__exit__(*error)
    return original(own, *error)


def sends_what_it_computes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may send results of its own: of DTensors, unless it is elementwise."""
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    if is_torchs and "foreach" in optimizer.defaults:
        return False
    return any(is_dtensor(one) for group in optimizer.param_groups for one in group["params"])


def _written(schema: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """What an operation has made or changed."""
    if not schema.is_mutable:
        return result
    names = [argument.name for argument in schema.arguments]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    return [
        bound[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name in bound
    ]


def _each(args: Any, written: Any) -> Iterator[tuple[Any, Any]]:
    """The operations of one on lists of tensors."""
    lists = [one for one in args if isinstance(one, (list, tuple)) and [*tensors_in(one)]]
    others = [one for one in args if isinstance(one, torch.Tensor)]
    outputs = written if len(written) != 1 else [*tensors_in(written)]
    for inputs, output in zip(zip(*lists, strict=False), outputs, strict=False):
        yield [*inputs, *others], [output]
