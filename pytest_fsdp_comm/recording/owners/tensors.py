"""Find the parameter or gradient that a collective carries."""

# Note [Tensors of parameters]
# A DTensor's collective reveals neither unit nor module: a parameter that user code gathers looks
# like an activation. To find out what a collective carries, we look at these, in this order:
# - The autograd graph. In backward, the running node may lead to a parameter's AccumulateGrad
#   through nothing but redistributions, casts and views of the gradient. In forward, the graph of a
#   redistributed DTensor, such as a cast copy, may lead to the parameter in the same way.
# - The storage. The bytes redistributed (before padding) or sent may be part of a parameter or of
#   its gradient. A table lists the storages of both. Addresses are reused, so we check each match
#   against the tensors that the model has at that moment.
# - The result. If a parameter's gradient later uses the storage of the result, the collective has
#   reduced that gradient. This finds the gradients that compiled code reduces.
# A tensor that could belong to several parameters gets no owner. If we find no parameter, the
# collective counts as sending activations of the running module. Copies without a graph (a cast
# under no_grad, a Muon step) cannot be traced to their parameters. FSDP's and DDP's collectives are
# attributed through their units instead.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fsdp_comm.comm.events import REDUCING, Phase, Role, Source
from pytest_fsdp_comm.recording.dtensors import unwrap_tensors
from pytest_fsdp_comm.recording.operations import NOWHERE, Operation, tensors_in
from pytest_fsdp_comm.recording.owners.attribution import Attribution, Carried, Label
from pytest_fsdp_comm.recording.owners.fsdp import direct_parameters, registered_parameters
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import StackScan, code_of
from pytest_fsdp_comm.upstream import look_up

_NAMED_BY_UNITS: Final = frozenset({Source.FSDP, Source.DDP, Source.OBJECT})
_HAS_ALL: Final = frozenset({Phase.OPTIMIZER, Phase.OUTSIDE})
"""The phases in which gradients are complete."""
_RUNS_MODULES: Final = frozenset({Phase.FORWARD, Phase.RECOMPUTE})

# Autograd nodes that pass a gradient on, and change only its placement, dtype, shape or memory.
_PASSES_ON: Final = frozenset(
    {
        *("RedistributeBackward", "NestedRedistributeBackward"),
        *("_ToTorchTensorBackward", "_FromTorchTensorBackward"),
        *("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "TBackward0"),
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0"),
    }
)


class Extent(NamedTuple):
    """The bytes that a tensor occupies in its storage, from `start` to `end` (exclusive)."""

    storage: int
    start: int
    end: int


class _Result(NamedTuple):
    """The result of a collective whose parameter has not been found yet."""

    carried: Carried
    reduces: bool
    storage: Any
    """A `StorageWeakRef`, which keeps a new storage from getting the same address."""
    extent: Extent
    version: int
    """The tensor's version, which autograd increments at each in-place change."""


class TensorOwners:
    """Find the parameters that a block's collectives carry. See Note [Tensors of parameters]."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self._roots = roots
        self._current_node: Callable[[], Any] = look_up("torch._C", "_current_autograd_node")
        # The labels of parameters and gradients, keyed by the address of their storage.
        self._table: dict[int, list[Label]] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        # The ids of the roots when the table was built. Since then: whether gradients have been
        # computed or reduced, and how many look-ups have failed.
        self._table_roots: list[int] = []
        self._has_new_gradients = False
        self._misses = 0
        # Results whose parameter is unknown, keyed by the address of their storage.
        self._results: dict[int, list[_Result]] = {}
        self._has_new_results = False

    def find_carried_parameter(
        self,
        scan: StackScan,
        operation: Operation,
        bound: Mapping[object, object],
        attribution: Attribution,
        dtensor: object,
    ) -> Carried | None:
        """Find the parameter or gradient in a call; None for FSDP, DDP and object calls."""
        # `bound` maps argument names to values. `dtensor` is the DTensor that user code is
        # redistributing through this call; None for any other call, such as a DTensor operator's.
        if attribution.source in _NAMED_BY_UNITS:
            return None
        node = self._current_node() if attribution.phase is Phase.BACKWARD else None
        if node is not None:
            label = _find_label_behind_node(node, Role.GRADIENTS)
        elif isinstance(dtensor, nn.Parameter):
            label = Label(parameter=dtensor, role=Role.PARAMETERS)
        else:
            label = _find_label_behind_node(getattr(dtensor, "grad_fn", None), Role.PARAMETERS)
        # In an AccumulateGrad, look at the tensor anyway: a parameter's hook may send any tensor.
        if label is None or hasattr(node, "variable"):
            if dtensor is not None:
                sent = dtensor
            elif scan.redistributing is not None:
                # Use get(): if torch has renamed the variable, let `dtensors.py` raise the error.
                sent = scan.redistributing.get("local_tensor")
            else:
                has_sent = operation.sent is not NOWHERE
                sent = bound.get(operation.sent if has_sent else operation.received)
            label = (
                self._find_label_by_storage(_list_plain_tensors(sent), dtensor, attribution)
                or label
            )
        if operation.kind == "all_gather" and dtensor is None:
            # Other ranks may send shards of different parameters than this rank, so look at the
            # whole output, not only at this rank's shard.
            extents = _list_extents(bound.get(operation.received))
            label = merge_labels([self._find_label(e, whole=False) for e in extents]) or label
        return Carried(label)

    def follow(self, operation: Operation, call: Attribution, received: Iterable[Any]) -> None:
        """Track the results of a call for which `find_carried_parameter` found no parameter."""
        unproven = call.carried
        # Do not track results in forward: they are activations, numerous and soon freed.
        if unproven is None or unproven.label is not None or call.phase in _RUNS_MODULES:
            return
        for tensor in received:
            extent = extent_of(tensor)
            if extent is not None:
                reference, version = make_storage_ref(tensor), _version(tensor)
                carried = unproven
                earlier = self._results.setdefault(extent.storage, [])
                for index, result in enumerate(earlier):
                    if result.version != version and _has_overlap(result.extent, extent):
                        # Both calls used this bucket, so a match would not show which one to label.
                        carried = Carried()
                        earlier[index] = result._replace(carried=carried)
                reduces = operation.kind in REDUCING
                self._has_new_results = True
                earlier.append(_Result(carried, reduces, reference, extent, version))

    def expect_new_gradients(self) -> None:
        """Build the table again when a look-up fails; pipelines reduce after backward, too."""
        self._has_new_gradients = True

    def attribute_new_results(self) -> None:
        """Call `attribute_results` if results were added since the last call."""
        if self._has_new_results:
            self.attribute_results()

    def attribute_results(self) -> None:
        """Attribute each result whose storage a parameter or gradient of the model now uses."""
        results = chain(*self._results.values())
        live = [result for result in results if not result.storage.expired()]
        if live:
            self._rebuild_label_table()
        for result in live:
            label = self._find_label(result.extent, whole=False)
            # Accept gradients only from reductions, and parameters only from other collectives: any
            # other match means that the storage was reused.
            if label is not None and result.reduces is (label.role is Role.GRADIENTS):
                result.carried.label = label
        self._results = {}
        for result in live:
            if result.carried.label is None:
                self._results.setdefault(result.extent.storage, []).append(result)
        self._has_new_results = False

    def forget(self) -> None:
        self._table.clear()
        self._parameters.clear()
        self._results.clear()

    def _find_label_by_storage(
        self, sent: Sequence[torch.Tensor], dtensor: object, attribution: Attribution
    ) -> Label | None:
        extents = [extent_of(tensor) for tensor in sent]
        running, runs_modules = attribution.issued_in, attribution.phase in _RUNS_MODULES
        if runs_modules:
            self.attribute_new_results()  # before the next backward replaces the gradients
            # Add parameters that the running module has registered since the table was built.
            for parameter in chain(*map(direct_parameters, running)):
                if id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = parameter
                    self._add_to_label_table(parameter, Role.PARAMETERS)
        if self._table_roots != [*map(id, self._roots)]:
            self._rebuild_label_table()
        label = self._find_common_label(extents)
        if label is None and runs_modules and _can_be_parameter_copy(dtensor, running):
            return Label(parameter=None, role=None)
        if label is None and attribution.phase in _HAS_ALL:
            self._misses += 1
            # User code can also set gradients, but building the table takes time proportional to
            # the number of parameters, so wait for many misses.
            if self._has_new_gradients or 4 * self._misses >= len(self._parameters):
                self._rebuild_label_table()
                label = self._find_common_label(extents)
        return label

    def _find_common_label(self, extents: Sequence[Extent | None]) -> Label | None:
        return merge_labels(
            [None if extent is None else self._find_label(extent) for extent in extents]
        )

    def _find_label(self, extent: Extent, *, whole: bool = True) -> Label | None:
        """Return the label at `extent`; if `whole`, an empty label unless one tensor covers it."""
        candidates = self._table.get(extent.storage)
        if candidates is None:
            return None
        labels, is_within = [], False
        for candidate in candidates:
            extents = _list_extents(_labelled_value_or_gradient(candidate))
            extents = [other for other in extents if _has_overlap(other, extent)]
            if extents:
                labels.append(candidate)
            for other in extents:
                is_within |= other.start <= extent.start and extent.end <= other.end
        label = merge_labels(labels)
        if label is None or is_within or not whole:
            return label
        return Label(parameter=None, role=None)

    def _rebuild_label_table(self) -> None:
        self._table = {}  # a new dict, because another thread may be reading the old dict
        self._parameters = {
            id(parameter): parameter for parameter, _ in registered_parameters(self._roots)
        }
        for parameter in self._parameters.values():
            self._add_to_label_table(parameter, Role.PARAMETERS)
            if parameter.is_leaf and parameter.grad is not None:
                self._add_to_label_table(parameter, Role.GRADIENTS)
        self._table_roots = [*map(id, self._roots)]
        self._has_new_gradients, self._misses = False, 0

    def _add_to_label_table(self, parameter: torch.Tensor, role: Role) -> None:
        label = Label(parameter=parameter, role=role)
        for tensor in _list_plain_tensors(_labelled_value_or_gradient(label)):
            if _has_strided_storage(tensor):
                labels = self._table.setdefault(tensor.untyped_storage()._cdata, [])
                # A DTensor may have several tensors in one storage.
                if not labels or labels[-1] is not label:
                    labels.append(label)


def _labelled_value_or_gradient(label: Label) -> object:
    """Return the labelled parameter, or its gradient at this moment."""
    parameter: Any = label.parameter
    return parameter if label.role is Role.PARAMETERS else parameter.grad


def merge_labels(labels: Sequence[Label | None]) -> Label | None:
    """Merge labels: fields that differ become None. None if `labels` is empty or contains None."""
    labelled = [label for label in labels if label is not None]
    if not labelled or len(labelled) < len(labels):
        return None
    has_one_parameter = len({id(label.parameter) for label in labelled}) == 1
    has_one_role = len({label.role for label in labelled}) == 1
    return Label(
        parameter=labelled[0].parameter if has_one_parameter else None,
        role=labelled[0].role if has_one_role else None,
    )


def extent_of(tensor: Any) -> Extent | None:
    """Return the extent of a plain tensor; None if it is expanded or has no storage."""
    if not _has_strided_storage(tensor):
        return None
    itemsize, numel = tensor.element_size(), tensor.numel()
    if numel and not tensor.is_contiguous():
        pairs = [*zip(tensor.shape, tensor.stride(), strict=True)]
        if any(size > 1 and not stride for size, stride in pairs):
            return None
        numel = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = tensor.storage_offset() * itemsize
    return Extent(tensor.untyped_storage()._cdata, start, start + numel * itemsize)


def _has_strided_storage(tensor: torch.Tensor) -> bool:
    # Opaque wrapper subclasses and functorch's tensors have no storage.
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def make_storage_ref(tensor: torch.Tensor) -> object:
    """Return a weak reference to the storage: it can be freed, but its address stays reserved."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _find_label_behind_node(node: Any, role: Role) -> Label | None:
    while node is not None:
        parameter = getattr(node, "variable", None)  # only an AccumulateGrad has one
        if parameter is not None:
            is_parameter = isinstance(parameter, nn.Parameter)
            return Label(parameter=parameter, role=role) if is_parameter else None
        if node.name() not in _PASSES_ON:
            return None
        inputs = [function for function, _ in node.next_functions if function is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return None


def find_redistributed_dtensor(frame: FrameType | None) -> object:
    """Return the DTensor that user code redistributes in `frame`; None if an operator does so."""
    if frame is None:
        return None
    code = code_of("torch.distributed.tensor._redistribute", "Redistribute.forward")
    for _ in range(3):  # wrappers of either function add frames in between
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is code:
            return frame.f_locals["input"]
    return None


def _can_be_parameter_copy(tensor: Any, modules: Modules) -> bool:
    """Whether a tensor without gradients may be a copy of a parameter, judging by its shape."""
    if tensor is None or tensor.requires_grad:
        return False
    parameters = chain(*map(direct_parameters, modules))
    return any(tensor.shape == parameter.shape for parameter in parameters)


def _list_plain_tensors(value: object) -> Sequence[torch.Tensor]:
    return [plain for tensor in tensors_in(value) for plain in unwrap_tensors(tensor)]


def _list_extents(value: object) -> list[Extent]:
    extents = map(extent_of, _list_plain_tensors(value))
    return [extent for extent in extents if extent is not None]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_overlap(a: Extent, b: Extent) -> bool:
    is_apart = a.start >= b.end or b.start >= a.end
    return a == b or (a.storage == b.storage and not is_apart)
