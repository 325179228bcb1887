"""Stores known values of simulated tensors per storage, and computes them when they are read."""

# A fake tensor has no memory, but does have a storage and an offset into it. All views of a storage
# share one `Values`, so that a write through one view is visible through the others. Operations on
# known values are recorded and run later, when a result is read. Before a write, all results that
# depend on the old values are computed. Small results are computed immediately, which costs less
# than recording the operation.

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
"""Maximum number of elements of a tensor whose values a simulation computes."""
TOO_MANY: Final = (
    f"they depend on a tensor of more than {MAX_NUMEL:_} elements (2**24), the limit of a "
    "simulation. Use a smaller tensor in the test, use values from your configuration"
)
_SMALL: Final = 2**12
"""A result is computed immediately if it and all inputs have at most this many elements."""
_MAX_DEPTH: Final = 32
"""Maximum length of a chain of recorded operations, because computing the chain is recursive."""
_VALUES: Final = "_fsdp_comm_values"
_REASON: Final = "_fsdp_comm_reason"


_IN_SCRIPTS: Final = {
    "run the test on real ranks, without simulate=": "record real ranks, with --nproc",
    "in the test": "in the script",
    "code that the test does not run": "code that the first steps do not run",
    "the code that the test runs": "the first steps",
    "keep checkpoints out of the test, run these ranks with real={'<axis>': <size>}, or": "or",
    "declare their shares (simulation_splits='even') or use": "use",
    "Run the ranks of that axis (for example real={'pp': 4}), send": "Send",
    "in this test": "in this script",
}
"""For texts about tests in errors, the texts for scripts that ``fsdp-comm record`` runs."""


class SimulationError(FsdpCommError):
    """Raised if code reads an unknown value, or does something that a simulation cannot do."""

    is_in_script = False
    """Whether this process simulates a rank of a script, not of a test."""

    def __init__(self, text: str) -> None:
        super().__init__(adapt_to_script(text) if SimulationError.is_in_script else text)


def adapt_to_script(text: str) -> str:
    """Make the text of an error speak about a script, not about a test."""
    for in_test, in_script in _IN_SCRIPTS.items():
        text = text.replace(in_test, in_script)
    return text


class OperatorCall(NamedTuple):
    """An operation with its arguments, as a mode receives it."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    types: Sequence[type] = ()
    tensors: Sequence[torch.Tensor] = ()
    """The tensors in the arguments."""


class Values:
    """The values in one storage."""

    def __init__(
        self, compute: Callable[[], torch.Tensor], inputs: Sequence[Values] = (), *, later: bool
    ) -> None:
        """Compute values from `inputs`: immediately or, if `later`, when they are read."""
        self._compute = compute
        self._storage: torch.UntypedStorage | None = None
        self.readers: weakref.WeakSet[Values] | None = None
        """Results that depend on these values; `compute_readers` computes the missing ones."""
        self.is_large = False
        """Whether these values, or values that they depend on, are too many to compute."""
        self.is_mirrored: bool = any(values.is_mirrored for values in inputs)
        """Whether the values are correct only if other ranks hold the same values as this rank."""
        self.depth: int = 1 + max((values.depth for values in inputs), default=0)
        if not later or self.depth > _MAX_DEPTH:
            self.compute_storage()
            return
        for values in inputs:
            values.readers = values.readers or weakref.WeakSet()
            values.readers.add(self)

    @classmethod
    def make_too_large(cls) -> Values:
        """Create values that count as known, but raise SimulationError when they are read."""
        values = cls(_raise_too_large, later=True)
        values.is_large, values.depth = True, 0
        return values

    def compute_storage(self) -> torch.UntypedStorage:
        """Return the storage that holds the values; compute them first if necessary."""
        if self._storage is None:
            with torch.no_grad(), unset_fake_temporarily():
                self._storage = self._compute().untyped_storage()
            self._compute, self.depth = _raise_too_large, 0  # frees the inputs
        return self._storage

    def compute_readers(self) -> None:
        """Compute all results that need these values, before the values are overwritten."""
        self.compute_storage()
        for reader in [*(self.readers or ())]:
            reader.compute_storage()
        self.readers = None


def _raise_too_large() -> torch.Tensor:
    raise SimulationError(
        f"{find_call_site()} reads tensor values that a simulated rank cannot compute: "
        f"{TOO_MANY}, or run the test on real ranks, without simulate="
    )


class _Layout(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any  # an int here, although torch's annotation allows a SymInt

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with this layout that views `storage`, which has memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


def _read_layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def storage_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor's storage; an empty dict if the tensor has none."""
    try:
        return vars(tensor.untyped_storage())
    except NotImplementedError:
        return {}


def stored_values(tensor: torch.Tensor) -> Values | None:
    """Return the values in a tensor's storage; None if unknown."""
    if isinstance(tensor, FakeTensor):
        return storage_attributes(tensor).get(_VALUES)
    if (
        type(tensor) is torch.Tensor
        and tensor.numel() <= MAX_NUMEL
        and tensor.layout is torch.strided
    ):
        return Values(lambda: tensor, later=False)
    return None


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are known, even if they are too many to compute."""
    return stored_values(tensor) is not None


def is_mirrored(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are correct only if other ranks hold the same values."""
    values = stored_values(tensor)
    return values is not None and values.is_mirrored


def has_integral_dtype(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers or booleans."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _can_have_known_values(tensor: FakeTensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.dtype.is_complex
    return is_plain and tensor.fake_device.type != "meta"


def is_covering_whole_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its entire storage."""
    is_strided = tensor.layout is torch.strided
    return is_strided and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def view_known_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory that views the known values, or `tensor` if they are unknown."""
    values = stored_values(tensor) if isinstance(tensor, FakeTensor) else None
    if values is None:
        return tensor
    with unset_fake_temporarily():
        return _read_layout(tensor).view(values.compute_storage())


def set_values(tensor: torch.Tensor, values: Values) -> None:
    """Set the values of a tensor's storage, for all of its views."""
    storage_attributes(tensor)[_VALUES] = values


def copy_value_into(
    tensor: torch.Tensor, value: torch.Tensor | None, *, is_mirrored: bool = False
) -> None:
    """Copy `value`, which has memory, into a simulated tensor; None makes its values unknown."""
    if not isinstance(tensor, FakeTensor):
        return
    tensor.constant = None  # where torch stores a known value, which is now outdated
    values = stored_values(tensor)
    if value is None:
        storage_attributes(tensor).pop(_VALUES, None)
    elif is_covering_whole_storage(tensor):
        set_values(
            tensor,
            Values(functools.partial(_match_layout, value, _read_layout(tensor)), later=False),
        )
    elif values is not None and not values.is_large:
        values.compute_readers()
        view_known_values(tensor).copy_(value.reshape(tensor.shape))
    if is_mirrored and (values := stored_values(tensor)) is not None:
        values.is_mirrored = True


def store_unknown_reason(tensor: torch.Tensor, reason: str) -> None:
    """Store why a tensor's integers or booleans are unknown; ignore floats and known values."""
    if has_integral_dtype(tensor) and stored_values(tensor) is None:
        storage_attributes(tensor)[_REASON] = reason


def share_values(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Make `tensor` share the values of `source`, or the reason why they are unknown."""
    values = stored_values(source)
    if values is not None:
        set_values(tensor, values)
    elif (reason := read_unknown_reason(source)) is not None:
        store_unknown_reason(tensor, reason)


def read_unknown_reason(tensor: torch.Tensor) -> str | None:
    """Return why the values of a tensor are unknown; None if no reason is stored."""
    return storage_attributes(tensor).get(_REASON)


def has_too_many_elements(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any of the tensors is too large, or depends on a tensor that is too large."""
    return any(
        tensor.numel() > MAX_NUMEL
        or ((values := stored_values(tensor)) is not None and values.is_large)
        for tensor in tensors
    )


def set_output_values(op: OperatorCall, outputs: Sequence[FakeTensor]) -> None:
    """Set the values of new outputs of `op`, whose inputs are known; compute them when read."""
    new = []
    for index, tensor in enumerate(outputs):
        # A known output is a view of an input.
        if _can_have_known_values(tensor) and not is_known(tensor):
            tensor.constant = None
            new.append((index, tensor))
    if has_too_many_elements([*op.tensors, *(tensor for _, tensor in new)]):
        for _, tensor in new:
            set_values(tensor, Values.make_too_large())
        return
    is_small = all(tensor.numel() <= _SMALL for tensor in (*op.tensors, *outputs))
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(op.func, "tags", ())
    has_only_fakes = all(isinstance(tensor, FakeTensor) for tensor in op.tensors)
    later = has_only_fakes and not (is_small or is_drawn)
    run = _make_saved_call(op)
    results = functools.cache(lambda: tensors_in(run()))
    inputs = _list_stored_values(op.tensors)
    for index, tensor in new:
        compute = functools.partial(_pick_result_with_layout, results, index, _read_layout(tensor))
        set_values(tensor, Values(compute, inputs, later=later))


def run_write(op: OperatorCall, written: Sequence[torch.Tensor]) -> None:
    """Run an operation that overwrites known tensors with known values."""
    if has_too_many_elements(op.tensors):
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                set_values(tensor, Values.make_too_large())
        return
    inputs, outputs = _list_stored_values(op.tensors), _list_stored_values(written)
    for values in outputs:
        values.compute_readers()
    _make_saved_call(op)()
    for values in outputs:
        values.is_mirrored |= any(source.is_mirrored for source in inputs)


def run_read(op: OperatorCall) -> object:
    """Run an operation on the values of known tensors, and return its result."""
    if has_too_many_elements(op.tensors):
        _raise_too_large()
    return _make_saved_call(op)()


def _list_stored_values(tensors: Iterable[torch.Tensor]) -> list[Values]:
    return [values for tensor in tensors if (values := stored_values(tensor)) is not None]


class _SavedTensor(NamedTuple):
    """The values and layout that a tensor argument had when its operation was recorded."""

    values: Values
    layout: _Layout


def _make_saved_call(op: OperatorCall) -> Callable[[], object]:
    """Return a function that runs the operation on the values that its arguments have now."""
    func, args, kwargs = op.func, _save_values(op.args), _save_values(op.kwargs)
    return lambda: func(*_restore_values(args), **_restore_values(kwargs))


def _save_values(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _SavedTensor(stored_values(value) or Values.make_too_large(), _read_layout(value))
    if isinstance(value, (list, tuple)):
        return [_save_values(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _save_values(part) for name, part in value.items() if name != "pin_memory"}
    return value


def _restore_values(saved: object) -> Any:
    if isinstance(saved, _SavedTensor):
        return saved.layout.view(saved.values.compute_storage())
    if isinstance(saved, list):
        return [_restore_values(part) for part in saved]
    if isinstance(saved, dict):
        return {name: _restore_values(part) for name, part in saved.items()}
    return saved


def _pick_result_with_layout(
    results: Callable[[], Sequence[torch.Tensor]], index: int, layout: _Layout
) -> torch.Tensor:
    return _match_layout(results()[index], layout)


def _match_layout(value: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """Return the tensor `value`, or a copy of it with this layout."""
    if (value.dtype, value.stride(), value.storage_offset()) == (
        layout.dtype,
        tuple(layout.stride),
        layout.offset,
    ):
        return value
    last = sum((size - 1) * step for size, step in zip(layout.size, layout.stride, strict=True))
    numel = max(0, layout.offset + last + 1)
    laid = torch.empty(numel, dtype=layout.dtype, device=value.device)
    laid = laid.as_strided(layout.size, layout.stride, layout.offset)
    return laid.copy_(value.reshape(layout.size))
