"""Say whose parameter or gradient a collective carries, where storage or graph prove it."""

# Note [Tensors of parameters]
# A collective of a DTensor shows neither a unit nor a module: a parameter that is gathered by hand
# looks like an activation. What it carries is proven, in this order,
# - in backward, by the autograd node that runs: a node that only passes on the gradient of one
#   parameter (a redistribution, casts and views between) ends in its AccumulateGrad. So does the
#   graph of a DTensor that forward redistributes, such as a cast copy;
# - by the storage of what is redistributed (before padding) or sent, if its bytes lie within those
#   of a parameter or of its gradient. A table has the storages, and each match is compared with
#   what the model holds at that moment, since addresses are used again;
# - by where the result goes, if a parameter has it as its gradient later: compiled code.
# A tensor that may belong to several parameters has no owner. One that is found nowhere keeps the
# owner and role of the code that sends it: activations of the module that runs. Copies are not
# followed, so a copy without a graph (a cast under no_grad, a step of Muon) is found nowhere. Units
# of FSDP and DDP say what they send, so nothing is looked up for them.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fsdp_comm.comm.events import REDUCING, Phase, Role, Source
from pytest_fsdp_comm.recording.dtensors import tensors_held
from pytest_fsdp_comm.recording.operations import NOWHERE, Operation, tensors_in
from pytest_fsdp_comm.recording.owners.attribution import Attribution, Carried, Label
from pytest_fsdp_comm.recording.owners.fsdp import own_parameters, registered_parameters
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import StackScan, code_of
from pytest_fsdp_comm.upstream import look_up

_NAMED_BY_UNITS: Final = frozenset({Source.FSDP, Source.DDP, Source.OBJECT})
_HAS_ALL: Final = frozenset({Phase.OPTIMIZER, Phase.OUTSIDE})
"""When gradients are complete."""
_RUNS_MODULES: Final = frozenset({Phase.FORWARD, Phase.RECOMPUTE})

# Nodes whose output is the gradient of their only input, elsewhere or in another form. Read in
# torch 2.6 to 2.13.
_PASSES_ON: Final = frozenset(
    {
        *("RedistributeBackward", "NestedRedistributeBackward"),
        *("_ToTorchTensorBackward", "_FromTorchTensorBackward"),
        *("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "TBackward0"),
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0"),
    }
)


class Extent(NamedTuple):
    """Where a tensor lies."""

    storage: int
    start: int
    """In bytes from the start of the storage."""
    end: int


class _Result(NamedTuple):
    """What an unnamed collective has received."""

    carried: Carried
    reduces: bool
    storage: Any
    """A `StorageWeakRef`, so that no other storage gets the same address."""
    extent: Extent
    version: int
    """Of the tensor, as autograd counts its changes."""


class TensorOwners:
    """Find what the collectives of a block carry. See Note [Tensors of parameters]."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self._roots = roots
        self._current_node: Callable[[], Any] = look_up("torch._C", "_current_autograd_node")
        self._next_number: Callable[[], int] = look_up("torch.autograd", "_get_sequence_nr")
        # By the address of a storage.
        self._table: dict[int, list[Label]] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        # Since the table was made: for which roots, at which number of the next autograd node, and
        # how many tensors were not found.
        self._made_for: list[int] = []
        self._made_at = 0
        self._misses = 0
        # By the address of its storage, which no other one gets meanwhile.
        self._results: dict[int, list[_Result]] = {}
        self._has_new_results = False

    def carried(
        self,
        scan: StackScan,
        operation: Operation,
        bound: Mapping[Any, Any],
        own: Attribution,
        given: Any,
    ) -> Carried | None:
        """What a call carries that is about to be made; None if it is the units' to say.

        Args:
            scan: Of the stack.
            operation: What the call does.
            bound: The arguments of the call by name.
            own: Of the call.
            given: The DTensor that the redistribution around it was asked for; None if an operator
                asked for it, or if there is none.
        """
        if own.source in _NAMED_BY_UNITS:
            return None
        node = self._current_node() if own.phase is Phase.BACKWARD else None
        if node is not None:
            label = _label_of_node(node, Role.GRADIENTS)
        elif isinstance(given, nn.Parameter):
            label = Label(parameter=given, role=Role.PARAMETERS)
        else:
            label = _label_of_node(getattr(given, "grad_fn", None), Role.PARAMETERS)
        # A hook on a parameter may send its gradient, and anything else too.
        if label is None or hasattr(node, "variable"):
            if given is not None:
                sent = given
            elif scan.redistributing is not None:
                # `redistributions.py` says if it has moved.
                sent = scan.redistributing.get("local_tensor")
            else:
                has_sent = operation.sent is not NOWHERE
                sent = bound.get(operation.sent if has_sent else operation.received)
            label = self._of_tensors(_plain(sent), given, own) or label
        if operation.kind == "all_gather" and given is None:
            # Its own part may be of one parameter, and the rest of others.
            extents = map(extent_of, _plain(bound.get(operation.received)))
            label = (
                merged([self._held_at(one, whole=False) for one in extents if one is not None])
                or label
            )
        return Carried(label)

    def follow(self, operation: Operation, own: Attribution, received: Iterable[Any]) -> None:
        """Note the results of a call that `name` found nothing for, outside of forward."""
        # In forward the results are activations, many, and soon gone.
        if own.carried is None or own.carried.label is not None or own.phase in _RUNS_MODULES:
            return
        for tensor in received:
            extent = extent_of(tensor)
            if extent is not None:
                reference, version = weak_storage(tensor), _version(tensor)
                carried = own.carried
                earlier = self._results.setdefault(extent.storage, [])
                for at, one in enumerate(earlier):
                    if one.version != version and _overlap(one.extent, extent):
                        # A bucket: what is in it at the end was not in it each time.
                        carried = Carried()
                        earlier[at] = one._replace(carried=carried)
                reduces = operation.kind in REDUCING
                self._has_new_results = True
                earlier.append(_Result(carried, reduces, reference, extent, version))

    def settle_new(self) -> None:
        """As `settle`, if results were noted since."""
        if self._has_new_results:
            self.settle()

    def settle(self) -> None:
        """Find the results that the model holds now."""
        live = [one for one in chain(*self._results.values()) if not one.storage.expired()]
        if live:
            self._make_table()
        for result in live:
            label = self._held_at(result.extent, whole=False)
            # What is reduced is a gradient, and a gradient is what is reduced; anything else was
            # written there for another reason.
            if label is not None and result.reduces is (label.role is Role.GRADIENTS):
                result.carried.label = label
        self._results = {}
        for one in live:
            if one.carried.label is None:
                self._results.setdefault(one.extent.storage, []).append(one)
        self._has_new_results = False

    def forget(self) -> None:
        self._table.clear()
        self._parameters.clear()
        self._results.clear()

    def _of_tensors(
        self, sent: Sequence[torch.Tensor], given: Any, own: Attribution
    ) -> Label | None:
        extents = [extent_of(tensor) for tensor in sent]
        if own.phase in _RUNS_MODULES:
            self.settle_new()  # before the next backward puts others in their place
            # What the running module has registered since the table was made.
            for parameter in (one for module in own.issued_in for one in own_parameters(module)):
                if id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = parameter
                    self._hold(parameter, Role.PARAMETERS)
        if self._made_for != [*map(id, self._roots)]:
            self._make_table()
        label = self._label_of_all(extents)
        if label is None and own.phase in _RUNS_MODULES and _may_be_copy(given, own.issued_in):
            return Label(parameter=None, role=None)
        if label is None and own.phase in _HAS_ALL:
            self._misses += 1
            made = self._next_number() - self._made_at
            # Gradients come and go. Making the table takes as long as there are parameters, so many
            # nodes or misses have to be new.
            if 4 * (made + self._misses) >= len(self._parameters):
                self._make_table()
                label = self._label_of_all(extents)
        return label

    def _label_of_all(self, extents: Sequence[Extent | None]) -> Label | None:
        return merged([None if one is None else self._held_at(one) for one in extents])

    def _held_at(self, extent: Extent, *, whole: bool = True) -> Label | None:
        """What the model holds there; with `whole`, in which all of it lies."""
        known = self._table.get(extent.storage)
        if known is None:
            return None
        found, is_within = [], False
        for held in known:
            places = [place for place in map(extent_of, _plain(_now(held))) if place is not None]
            places = [place for place in places if _overlap(place, extent)]
            if places:
                found.append(held)
            for place in places:
                is_within |= place.start <= extent.start and extent.end <= place.end
        label = merged(found)
        if label is None or is_within or not whole:
            return label
        # Beside what is known there is something else in it.
        return Label(parameter=None, role=None)

    def _make_table(self) -> None:
        self._table = {}  # another thread may read the one before
        self._parameters = {
            id(parameter): parameter for parameter, _ in registered_parameters(self._roots)
        }
        for parameter in self._parameters.values():
            self._hold(parameter, Role.PARAMETERS)
            if parameter.is_leaf and parameter.grad is not None:
                self._hold(parameter, Role.GRADIENTS)
        self._made_for = [*map(id, self._roots)]
        self._made_at, self._misses = self._next_number(), 0

    def _hold(self, parameter: torch.Tensor, role: Role) -> None:
        held = Label(parameter=parameter, role=role)
        for tensor in _plain(_now(held)):
            if _has_bytes(tensor):
                known = self._table.setdefault(tensor.untyped_storage()._cdata, [])
                if not known or known[-1] is not held:  # one may have several tensors there
                    known.append(held)


def _now(label: Label) -> object:
    """What the model holds there at this moment."""
    own: Any = label.parameter
    return own if label.role is Role.PARAMETERS else own.grad


def merged(labels: Sequence[Label | None]) -> Label | None:
    """What all of them are; None if any is unknown, or if there are none."""
    known = [label for label in labels if label is not None]
    if not known or len(known) < len(labels):
        return None
    is_one = len({id(label.parameter) for label in known}) == 1
    has_one_role = len({label.role for label in known}) == 1
    return Label(
        parameter=known[0].parameter if is_one else None,
        role=known[0].role if has_one_role else None,
    )


def extent_of(tensor: Any) -> Extent | None:
    """Where a plain tensor lies; None for an expanded one, and for one without storage."""
    if not _has_bytes(tensor):
        return None
    itemsize, numel = tensor.element_size(), tensor.numel()
    if numel and not tensor.is_contiguous():
        pairs = [*zip(tensor.shape, tensor.stride(), strict=True)]
        if any(size > 1 and not stride for size, stride in pairs):
            return None
        numel = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = tensor.storage_offset() * itemsize
    return Extent(tensor.untyped_storage()._cdata, start, start + numel * itemsize)


def _has_bytes(tensor: Any) -> bool:
    # A wrapper that nobody can take apart has no storage, nor has a tensor of functorch.
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference that frees the bytes, and keeps the address from being used again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _label_of_node(node: Any, role: Role) -> Label | None:
    while node is not None:
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if parameter is not None:
            is_parameter = isinstance(parameter, nn.Parameter)
            return Label(parameter=parameter, role=role) if is_parameter else None
        if node.name() not in _PASSES_ON:
            return None
        following = [found for found, _ in node.next_functions if found is not None]
        node = following[0] if len(following) == 1 else None
    return None


def redistributed(frame: FrameType | None) -> Any:
    """The DTensor that `redistribute_local_tensor` was asked for; None if an operator did."""
    if frame is None:
        return None
    code = code_of("torch.distributed.tensor._redistribute", "Redistribute", "forward")
    for _ in range(3):  # what wraps either function lies between
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is code:
            return frame.f_locals["input"]
    return None


def _may_be_copy(given: Any, modules: Modules) -> bool:
    """Whether something without a graph is shaped as a parameter of the running module is."""
    if given is None or given.requires_grad:
        return False
    own = (one for module in modules for one in own_parameters(module))
    return any(given.shape == parameter.shape for parameter in own)


def _plain(value: object) -> Sequence[torch.Tensor]:
    return [plain for tensor in tensors_in(value) for plain in tensors_held(tensor)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _overlap(one: Extent, other: Extent) -> bool:
    is_beside = one.start >= other.end or other.start >= one.end
    return one == other or (one.storage == other.storage and not is_beside)
