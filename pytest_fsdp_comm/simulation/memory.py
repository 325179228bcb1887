"""The values of simulated tensors, kept for each storage and computed when they are read."""

# Note [Values of a storage]
# A fake tensor knows its storage and its place there, so all views of a storage share one `Values`,
# and a write through one view reaches the others. An operation on known values is only noted.
# Reading computes it, and a write first computes whatever still needs the old values. Small results
# are computed at once, which costs less than a note.

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.operations import tensors_in

MAX_NUMEL: Final = 2**24
"""The most elements of which values are computed."""
TOO_MANY: Final = (
    f"they follow from a tensor of more than {MAX_NUMEL:_} elements (2**24), the most that are "
    "computed; use a smaller tensor in the test, or let numbers of the configuration decide"
)
_SMALL: Final = 2**12
"""The most elements that are computed at once."""
_MAX_DEPTH: Final = 32
"""The most noted operations in a row, since computing them recurses."""
_VALUES: Final = "_fsdp_comm_values"
_REASON: Final = "_fsdp_comm_reason"


class SimulationError(FsdpCommError):
    """Code of a simulated rank needs a value that nothing knows."""


class Values:
    """The values in one storage."""

    def __init__(
        self, compute: Callable[[], torch.Tensor], inputs: Sequence[Values] = (), *, later: bool
    ) -> None:
        """Compute values from `inputs`: at once, or later, when they are read."""
        self._compute = compute
        self._storage: torch.UntypedStorage | None = None
        self.readers: weakref.WeakSet[Values] | None = None
        """What is computed from these values later."""
        self.is_large = False
        """Whether there are too many to compute, or they follow from too many."""
        self.is_mirrored: bool = any(each.is_mirrored for each in inputs)
        """Whether other ranks hold them only if they hold what this one does."""
        self.depth: int = 1 + max((each.depth for each in inputs), default=0)
        if not later or self.depth > _MAX_DEPTH:
            self.storage()
            return
        for each in inputs:
            each.readers = each.readers or weakref.WeakSet()
            each.readers.add(self)

    @classmethod
    def too_large(cls) -> Values:
        """Values that are an error to read."""
        values = cls(_refuse_size, later=True)
        values.is_large, values.depth = True, 0
        return values

    def storage(self) -> torch.UntypedStorage:
        """The memory of the values, which are computed now if they have not been before."""
        if self._storage is None:
            with torch.no_grad(), unset_fake_temporarily():
                self._storage = self._compute().untyped_storage()
            self._compute, self.depth = _refuse_size, 0  # drops what it was computed from
        return self._storage

    def settle(self) -> None:
        """Compute what needs these values, before they are overwritten."""
        self.storage()
        for reader in [*(self.readers or ())]:
            reader.storage()
        self.readers = None


def _refuse_size() -> torch.Tensor:
    raise SimulationError(
        f"{find_call_site()} reads values of a tensor, which a simulated rank does not have: "
        f"{TOO_MANY}; or run the test on real ranks, without simulate="
    )


class _Place(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any  # an int, which torch types as possibly symbolic

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor with memory that lies there."""
        own = torch.empty(0, dtype=self.dtype, device=storage.device)
        return own.set_(storage, self.offset, self.size, self.stride)


def _place(own: torch.Tensor) -> _Place:
    return _Place(own.dtype, own.size(), own.stride(), own.storage_offset())


def _attributes(own: torch.Tensor) -> dict[str, Any]:
    """What is noted of a tensor's storage; not kept for sparse tensors, which have none."""
    try:
        return vars(own.untyped_storage())
    except NotImplementedError:
        return {}


def values_in(own: torch.Tensor) -> Values | None:
    """The values in a tensor's storage, None if unknown."""
    if isinstance(own, FakeTensor):
        return _attributes(own).get(_VALUES)
    if type(own) is torch.Tensor and own.numel() <= MAX_NUMEL and own.layout is torch.strided:
        return Values(lambda: own, later=False)
    return None


def is_known(own: torch.Tensor) -> bool:
    """Whether a tensor has values, possibly too many to compute."""
    return values_in(own) is not None


def is_mirrored(own: torch.Tensor) -> bool:
    """Whether a tensor has values that rest on those of other ranks."""
    values = values_in(own)
    return values is not None and values.is_mirrored


def is_whole(own: torch.Tensor) -> bool:
    """Whether a tensor has integers or booleans."""
    return not (own.dtype.is_floating_point or own.dtype.is_complex)


def _may_hold(own: FakeTensor) -> bool:
    is_plain = own.layout is torch.strided and not own.dtype.is_complex
    return is_plain and own.fake_device.type != "meta"


def covers(own: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    is_strided = own.layout is torch.strided
    return is_strided and own.numel() * own.itemsize == own.untyped_storage().nbytes()


def real(own: torch.Tensor) -> torch.Tensor:
    """A known tensor with memory, which a write reaches; an unknown one as it is."""
    values = values_in(own) if isinstance(own, FakeTensor) else None
    if values is None:
        return own
    with unset_fake_temporarily():
        return _place(own).view(values.storage())


def forget(own: torch.Tensor) -> None:
    """Have all views of a tensor's storage without values."""
    _attributes(own).pop(_VALUES, None)


def keep(own: torch.Tensor, values: Values) -> None:
    """Have all views of a tensor's storage with these values."""
    _attributes(own)[_VALUES] = values


def put(own: torch.Tensor, found: torch.Tensor | None, *, is_mirrored: bool = False) -> None:
    """Write values with memory into a simulated tensor; None if they are unknown."""
    if not isinstance(own, FakeTensor):
        return
    own.constant = None  # torch's own note of a value
    values = values_in(own)
    if found is None:
        _attributes(own).pop(_VALUES, None)
    elif covers(own):
        keep(own, Values(functools.partial(_laid, found, _place(own)), later=False))
    elif values is not None and not values.is_large:
        values.settle()
        real(own).copy_(found.reshape(own.shape))
    if is_mirrored and (values := values_in(own)) is not None:
        values.is_mirrored = True


def explain(own: torch.Tensor, reason: str) -> None:
    """Keep why the integers or booleans of a tensor are unknown, if they are."""
    if is_whole(own) and values_in(own) is None:
        _attributes(own)[_REASON] = reason


def share(own: torch.Tensor, other: torch.Tensor) -> None:
    """Have a tensor with the values of another one of the same layout, if these are known."""
    values = values_in(other)
    if values is not None:
        keep(own, values)
    elif (reason := reason_of(other)) is not None:
        explain(own, reason)


def reason_of(own: torch.Tensor) -> str | None:
    """Why the values of a tensor are unknown, if that is kept."""
    return _attributes(own).get(_REASON)


def are_too_many(given: Iterable[torch.Tensor]) -> bool:
    """Whether some known tensors are too large to compute with, or follow from such."""
    return any(
        own.numel() > MAX_NUMEL or ((values := values_in(own)) is not None and values.is_large)
        for own in given
    )


def note(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    made: Sequence[FakeTensor],
) -> None:
    """Note the values of new tensors, which `func` computes from known ones."""
    new = []
    for index, own in enumerate(made):
        if _may_hold(own) and not is_known(own):  # otherwise it is a view of an input
            own.constant = None
            new.append((index, own))
    if are_too_many([*given, *(own for _, own in new)]):
        for _, own in new:
            keep(own, Values.too_large())
        return
    is_small = all(own.numel() <= _SMALL for own in (*given, *made))
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    later = not (is_small or is_drawn) and all(isinstance(own, FakeTensor) for own in given)
    results = functools.cache(functools.partial(_run, func, _noted(args), _noted(kwargs)))
    inputs = [values for own in given if (values := values_in(own)) is not None]
    for index, own in new:
        compute = functools.partial(_part, results, index, _place(own))
        keep(own, Values(compute, inputs, later=later))


def write(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> None:
    """Run an operation that writes known values into known tensors."""
    if are_too_many(given):
        for own in written:
            if isinstance(own, FakeTensor):
                keep(own, Values.too_large())
        return
    inputs = [values for own in given if (values := values_in(own)) is not None]
    outputs = [values for own in written if (values := values_in(own)) is not None]
    for values in outputs:
        values.settle()
    _run(func, _noted(args), _noted(kwargs))
    for values in outputs:
        values.is_mirrored |= any(each.is_mirrored for each in inputs)


def read(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
) -> Any:
    """The result of an operation on known tensors, with memory."""
    if are_too_many(given):
        _refuse_size()
    return func(*_found(_noted(args)), **_found(_noted(kwargs)))


class _Noted(NamedTuple):
    """A tensor that an operation is given, as it is when it is noted."""

    values: Values
    place: _Place


def _noted(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return _Noted(values_in(given) or Values.too_large(), _place(given))
    if isinstance(given, (list, tuple)):
        return [_noted(own) for own in given]
    if isinstance(given, Mapping):
        return {name: _noted(own) for name, own in given.items() if name != "pin_memory"}
    return given


def _found(noted: Any) -> Any:
    if isinstance(noted, _Noted):
        return noted.place.view(noted.values.storage())
    if isinstance(noted, list):
        return [_found(own) for own in noted]
    if isinstance(noted, dict):
        return {name: _found(own) for name, own in noted.items()}
    return noted


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Sequence[torch.Tensor]:
    return tensors_in(func(*_found(args), **_found(kwargs)))


def _part(results: Callable[[], Sequence[torch.Tensor]], index: int, place: _Place) -> torch.Tensor:
    return _laid(results()[index], place)


def _laid(found: torch.Tensor, place: _Place) -> torch.Tensor:
    """Values with memory, laid out as `place` says."""
    if (found.dtype, found.stride(), found.storage_offset()) == (
        place.dtype,
        tuple(place.stride),
        place.offset,
    ):
        return found
    last = sum((size - 1) * step for size, step in zip(place.size, place.stride, strict=True))
    numel = max(0, place.offset + last + 1)
    laid = torch.empty(numel, dtype=place.dtype, device=found.device)
    laid = laid.as_strided(place.size, place.stride, place.offset)
    return laid.copy_(found.reshape(place.size))
