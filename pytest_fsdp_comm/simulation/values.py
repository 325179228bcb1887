"""Tensors without memory, and what is known of their values."""

# Note [Known values]
# A small tensor that is computed from known values alone, such as positions or the sizes of parts,
# has its values beside it: each operation on it also runs on them, views and writes in place
# included, so that those of all its aliases follow. What is random, empty, or computed from such is
# unknown. A write of something unknown takes the memory of the values away, and with it those of
# every alias.
# A collective on known values leaves what it would if every peer held the same, and the memory of
# these is marked, as is what is computed from them: to read them is an answer of ours, since what a
# rank computes from its own number is another value on each.
# In a group whose ranks run, whole numbers and truths arrive, as objects do. They are awaited where
# their memory is first used: a rank that receives ahead of its use must not wait for the peer.

# Note [Declared routing]
# Experts are chosen by scores, which nobody knows, in one operation on their last dimension. With
# `simulation_splits` its indices have values, and what is counted, sorted and sent by them follows:
# the counts of all ranks fit together, as those of splits that are made up one by one would not.

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.recording.frames import find_call_site, is_outside_torch
from pytest_fsdp_comm.recording.kernels import set_compiler
from pytest_fsdp_comm.recording.operations import NAMESPACES, UNKNOWN, call_of, group_of, tensors_in
from pytest_fsdp_comm.recording.owners.stack import running
from pytest_fsdp_comm.recording.patches import hide_from_compiler
from pytest_fsdp_comm.recording.value_dependence import note_answer
from pytest_fsdp_comm.simulation.groups import RealGroups, mirrored

_MAX_NUMEL: Final = 2**18
"""Of a tensor whose values are kept: 2 MiB of int64."""
_VALUES: Final = "_fsdp_comm_values"
_MIRRORED: Final = "_fsdp_comm_mirrored"
"""On the memory of values: other ranks hold them only if they hold what this one does."""
_CHOICES: Final = {
    torch.ops.aten.topk.default,
    torch.ops.aten.argmax.default,
    torch.ops.aten.max.dim,
}
"""The operations by which experts are chosen; the last that they return are indices."""
_ROUNDING: Final = 1e-9
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_DRAWS: Final = {"empty", "multinomial", "randint", "random_", "randperm"}
"""What torch's samplers draw by, and the seeds that they draw."""
_LOADER: Final = f"{torch.__path__[0]}/utils/data/"
_MARK: Final = "_fsdp_comm_device"
"""Of memory: the device that it would be on. See Note [Cuda without CUDA] in `devices.py`."""
CPU: Final = torch.device("cpu")
_SWAP: Final = torch.utils.swap_tensors
_DEVICE: Final = torch.ops.prim.device.default
_READ: Final = torch.ops.aten._local_scalar_dense.default
_COPY: Final = torch.ops.aten.copy_.default
_awaited: Final[dict[int, list[Callable[[], None]]]] = {}
"""By the address of a storage, which these keep: what writes the values that arrive in it."""


_PLAIN: Final = frozenset(
    {
        *(bool, float, int, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
"""Of these, two of one type that are equal do the same."""
_LISTS: Final = frozenset({list, tuple, torch.Size})


class SimulationError(FsdpCommError):
    """Code of a simulated rank needs a value that nothing knows."""


class _OfThread:
    """An attribute that each thread has for itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._held = make, threading.local()

    def __get__(self, _: object, __: type) -> Any:
        if not hasattr(self._held, "value"):
            self._held.value = self._make()
        return self._held.value

    def __set__(self, _: object, value: Any) -> None:
        self._held.value = value


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Have every tensor made without memory. See Note [Known values]."""

    has_marks = False
    has_cuda = False
    # torch keeps these in the mode, which threads share.
    in_kernel_invocation = _OfThread(bool)
    enter_stack = _OfThread(list)
    supports_higher_order_operators = True

    def __init__(self, *, answers: bool, shares: tuple[float, ...] | None = None) -> None:
        """Prepare to answer for some unknown values, or to refuse for all.

        `shares` are those of experts in what is chosen, empty if equal, None if not declared.
        """
        hide_from_compiler()
        # What a test module has made before has memory; it counts as known.
        super().__init__(allow_non_fake_inputs=True)
        self._answers = answers
        self._shares = shares
        self.begin(None)

    def begin(self, groups: RealGroups | None) -> None:
        """Begin a test; `groups` are those whose ranks run, None if this rank runs alone."""
        self._groups = groups
        SimulatedTensors.has_cuda = False
        _awaited.clear()

    def known(self, given: torch.Tensor) -> torch.Tensor:
        """A tensor with memory as one without, whose values are known unless it is large."""
        own = self.from_tensor(given)
        if given.numel() <= _MAX_NUMEL:
            _write(own, given.clone())
        return own

    @staticmethod
    def _should_skip_dynamo() -> bool:
        # torch's way around the compiler takes as long as what it is put around.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Half of all operations of a step ask for a device, and an eighth is DTensor's to run.
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if DTensor in types:
            return NotImplemented
        compiler = set_compiler(None)
        try:
            return self._placed(func, types, args, kwargs or {})
        finally:
            set_compiler(compiler)

    def _placed(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        place = kwargs.get("device")
        if place is not None and (
            (place.type == "cuda" and not torch.cuda.is_available())
            or (place.type == "cpu" and place.index is not None)
        ):
            kwargs = {**kwargs, "device": CPU}
        custom = _custom_function(func)
        if custom and _names_group((*args, *kwargs.values())):
            with self:
                return custom(*args, **kwargs)
        given = _tensors(args) + _tensors(kwargs.values())
        _await(given)
        if not (self.has_marks or place):
            return self._run(func, types, args, kwargs, given)
        marks = [place] if place else [] if func is _COPY else [*filter(None, map(mark_of, given))]
        result = self._run(func, types, args, kwargs, given)
        if marks and marks[0].type == "cuda":
            for own in (*_made(result), *(given if _writes(func) else ())):
                mark(own, marks[0])
        elif place:  # which torch may have made from a copy with a mark
            for own in _made(result):
                vars(own.untyped_storage()).pop(_MARK, None)
        return result

    def _run(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> Any:
        is_known = all(map(_is_known, given)) and (not _is_made_up(func) or _loads_data(func, args))
        if func is _READ and is_known:  # torch would look for a note of its own
            return self._read(func, args, kwargs, given)
        try:
            result = self.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._read(func, args, kwargs, given) if is_known else self._answer(func, args)
        except UnsupportedOperatorException:
            raise SimulationError(
                f"{find_call_site()} calls {func.namespace}.{func._opname}, which does not say "
                "what sizes it returns, and a simulated rank cannot run it: register a fake "
                "implementation with torch.library.register_fake, or run the test on real ranks, "
                "without simulate="
            ) from None
        if is_known and all(own.numel() <= _MAX_NUMEL for own in _made(result)):
            _keep(_made(result), func(*_values(args), **_values(kwargs)), given)
        elif given and isinstance(func, OpOverload):
            self._follow(func, args, kwargs, result)
        return result

    def _follow(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if func.namespace in NAMESPACES:
            self._communicate(func, args, kwargs, result)
        elif _writes(func):
            for own in _written(func, args, kwargs):
                _write(own, None)
            if func is _UNSCALE:
                self._answer_unscaled(args[1])
        elif self._shares is not None and func in _CHOICES:
            self._choose(_named(func, args, kwargs), result)

    def _read(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> Any:
        if any(map(_is_mirrored, given)):
            self._answer_mirrored(func, args)
        found = func(*_values(args), **_values(kwargs))
        result = tree_map_only(torch.Tensor, self.from_tensor, found)
        _keep(_made(result), found, given)
        return result

    # Read in torch 2.13; where it is called otherwise, or never, it is torch's.
    def _cache_key(
        self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """As torch's, which takes a sixth of a step, of what nearly all operations are given."""
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        key.append(torch.is_inference_mode_enabled())
        if self._add_to_key(key, args) and self._add_to_key(key, [*kwargs, *kwargs.values()]):
            return tuple(key)
        return super()._cache_key(state, func, args, kwargs)

    def _add_to_key(self, key: list[Any], given: Sequence[Any]) -> bool:
        """Add all that a result may depend on; False for anything special."""
        key.append(len(given))
        for own in given:
            kind = type(own)
            key.append(kind)
            if kind is FakeTensor:
                if (
                    own.constant is not None
                    or own.fake_mode is not self
                    or own.layout is not torch.strided
                    or own._has_symbolic_sizes_strides
                    or own.is_quantized
                ):
                    return False
                key += (own.dtype, own.shape, own.stride(), own.storage_offset(), own.fake_device)
                key += (own.untyped_storage().nbytes(), own.requires_grad, own.is_conj())
                key += (own.is_neg(), own.is_inference())
            elif kind in _PLAIN:
                key.append(own)
            elif kind not in _LISTS or not self._add_to_key(key, own):
                return False
        return True

    def swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """As torch's, which `Module.to` and ``to_empty`` use for simulated parameters."""
        # It refuses what has weak references, as torch keeps some of what was made on meta.
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        _SWAP(one, other)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _communicate(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Know what a collective leaves, if what is sent is known. See Note [Known values]."""
        call = call_of(func)
        if call is None:  # it waits for one, or wraps its result
            pairs = zip(_made(result), tensors_in([*args, kwargs]), strict=False)
            for own, other in filter(lambda pair: _is_known(pair[1]), pairs):
                _keep([own], values_of(other), [other])
            return
        bound, operation = call.bind(args, kwargs), call.operation
        group = group_of(bound)
        sent = operation.tensors_sent(bound)
        # The schemas of c10d tell of no writes.
        outputs = [*operation.tensors_received(bound, result), *_written(func, args, kwargs)]
        if operation.kind == "reduce" or operation.kind.startswith(UNKNOWN):
            outputs += sent
        is_known = all(_is_known(own) and own.numel() <= _MAX_NUMEL for own in sent)
        held = [*map(values_of, sent)] if is_known else None
        values: list[torch.Tensor | None] = [None] * len(outputs)
        if group is not None and self._groups is not None and self._groups.has(group):
            arrives = None
            dtype = next((own.dtype for own in (*sent, *outputs)), torch.float32)
            if not (dtype.is_floating_point or dtype.is_complex):
                arrives = self._groups.exchange(operation, group, bound, held)
            if arrives is not None:
                fill = functools.cache(functools.partial(_fill, outputs, arrives))
                for own in outputs:
                    _awaited.setdefault(own.untyped_storage()._cdata, []).append(fill)
                return
        elif group is not None and held:
            values = mirrored(operation.kind, group, bound, held, outputs)
        for output, value in zip(outputs, values, strict=True):
            _write(output, value, is_mirrored=group is not None and group.size() > 1)

    def _answer(self, func: Any, args: Sequence[Any]) -> bool | float:
        if not (self._answers and _is_answered(func, args)):
            raise SimulationError(
                f"{find_call_site()} reads values of a tensor ({_how(func)}), which a simulated "
                "rank does not have: let numbers of the configuration decide in their place, such "
                "as a balanced routing; where scores choose experts, declare their shares, "
                "simulation_splits='even'; where a rank that does not run should send them, as a "
                "stage of a pipeline its shapes, have the ranks of that axis run, real={'pp': 4}; "
                "or run the test on real ranks, without simulate="
            ) from None
        is_number = args[0].dtype != torch.bool and func is not torch.ops.aten.equal.default
        answer = 1.0 if is_number else False
        note_answer(answer, _how(func))
        return answer

    def _answer_unscaled(self, found: torch.Tensor) -> None:
        """Have a scaler of gradients find none that is infinite: otherwise it leaves steps out."""
        if not self._answers:
            raise SimulationError(
                f"{find_call_site()} has a GradScaler look for infinite gradients, of which a "
                "simulated rank has no values: use GradScaler(enabled=False), or simulate=True"
            )
        note_answer("False", "GradScaler")
        with unset_fake_temporarily():
            _write(found, torch.zeros(found.shape, device="cpu"))

    def _answer_mirrored(self, func: Any, args: Sequence[Any]) -> None:
        """Note that values are read which are right only if other ranks hold the same."""
        if self._shares is not None and running():
            return  # it is declared that all ranks route alike
        if not self._answers:
            raise SimulationError(
                f"{find_call_site()} reads what other ranks would have sent ({_how(func)}): a "
                "simulated rank takes them to hold what it holds itself; if they do, as where all "
                "route alike, declare simulation_splits='even', or simulate=True; otherwise run "
                "the test on real ranks, without simulate="
            ) from None
        # A count may decide what is sent long after it was read.
        note_answer("mirrored", _how(func), of_process=not _is_answered(func, args))

    def _choose(self, named: Mapping[str, Any], result: Any) -> None:
        """Know which experts are chosen. See Note [Declared routing]."""
        scores, indices = named["self"], _made(result)[-1]
        num_experts, k = scores.shape[-1] if scores.dim() else 0, named.get("k", 1)
        shares = self._shares or (1.0,) * num_experts
        is_last = named.get("dim", -1 if "k" in named else None) in {-1, scores.dim() - 1}
        fits = len(shares) == num_experts and 0 < indices.numel() <= _MAX_NUMEL
        if not (is_last and fits and scores.is_floating_point()):
            return
        most = max(shares) / sum(shares)
        if most * k > 1 + _ROUNDING:
            raise SimulationError(
                f"{find_call_site()} chooses {k} experts of {num_experts} for each token, so that "
                f"none has a share above {1 / k:.3g}; simulation_splits gives one {most:.3g}: "
                "give each at most that, or 'even'"
            )
        # At equal distances in the sum of all shares, those of one token the furthest apart.
        total = indices.numel()
        places = torch.arange(total, device="cpu").view(k, -1).T.flatten()
        limits = torch.tensor(shares, device="cpu", dtype=torch.float64).cumsum(0)
        chosen = torch.searchsorted(limits, (places + 0.5) / total * limits[-1], right=True)
        _write(indices, chosen.clamp_(max=num_experts - 1).view(indices.shape))


def _is_answered(func: Any, args: Sequence[Any]) -> bool:
    # A made-up count would decide shapes. A number or a truth rarely decides what is sent.
    if func is torch.ops.aten.equal.default:
        return True
    dtype = args[0].dtype
    is_number = func is _READ
    return is_number and (dtype.is_floating_point or dtype == torch.bool)


def _how(func: Any) -> str:
    name = str(func.overloadpacket.__name__)
    return "item" if name == "_local_scalar_dense" else name


def mark(tensor: torch.Tensor, device: torch.device) -> None:
    """Mark the memory of a simulated tensor as that of a device."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
        setattr(tensor.untyped_storage(), _MARK, device)
        SimulatedTensors.has_marks = SimulatedTensors.has_cuda = True


def mark_of(tensor: torch.Tensor) -> torch.device | None:
    """The device that a simulated tensor would be on, if it is another one than it says."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, FakeTensor):
        return None
    return vars(tensor.untyped_storage()).get(_MARK)


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    # As torch's tree_leaves finds them, which takes a fifth of a step.
    found = []
    for own in given:
        if isinstance(own, torch.Tensor):
            found.append(own)
        elif isinstance(own, (list, tuple)):
            found += _tensors(own)
    return found


def _made(result: Any) -> list[FakeTensor]:
    if isinstance(result, FakeTensor):
        return [result]
    return [own for own in tensors_in(result) if isinstance(own, FakeTensor)]


@functools.cache
def _custom_function(func: Any) -> Callable[..., Any] | None:
    """The function of a custom operator, whose fake sends nothing."""
    operator = OPDEFS.get(func._schema.name) if isinstance(func, OpOverload) else None
    return operator._init_fn if operator else None


def _names_group(given: Iterable[Any]) -> bool:
    names = {*distributed_c10d._world.pg_names.values()}
    return any(isinstance(own, str) and own in names for own in given)


@functools.cache
def _is_made_up(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace in NAMESPACES:
        return True
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._opname


def _loads_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch's own loading of data draws numbers: of samples, not of values."""
    name = func._opname if isinstance(func, OpOverload) else ""
    if name not in _DRAWS or (name == "empty" and args[0]):
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_outside_torch(frame):
        if frame.f_code.co_filename.startswith(_LOADER):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _writes(func: Any) -> bool:
    # The schemas of those that communicate tell of no writes.
    return isinstance(func, OpOverload) and (
        func._schema.is_mutable or func.namespace in NAMESPACES
    )


def _is_known(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, FakeTensor):
        return tensor.numel() <= _MAX_NUMEL and type(tensor) is torch.Tensor
    values = tensor.__dict__.get(_VALUES)
    return values is not None and (not values.numel() or values.untyped_storage().nbytes() > 0)


def is_own(tensor: torch.Tensor) -> bool:
    """Whether values are known that other ranks have no part in, or have truly sent."""
    _await([tensor])
    return _is_known(tensor) and not _is_mirrored(tensor)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that is known; the tensor itself if they are not."""
    _await([tensor])
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


def _keep(made: Sequence[FakeTensor], found: Any, given: Sequence[torch.Tensor]) -> None:
    is_mirrored = any(map(_is_mirrored, given))
    for own, value in zip(made, tensors_in(found), strict=True):
        setattr(own, _VALUES, value)
        # torch's own note of a value, with which it computes once more
        own.constant = None
        if is_mirrored:
            setattr(value.untyped_storage(), _MIRRORED, True)


def _is_mirrored(tensor: torch.Tensor) -> bool:
    values = tensor.__dict__.get(_VALUES)
    return values is not None and hasattr(values.untyped_storage(), _MIRRORED)


def _write(own: Any, value: torch.Tensor | None, *, is_mirrored: bool = False) -> None:
    if not isinstance(own, FakeTensor):
        return
    # torch's own note of a value, which it drops where a schema tells of writes
    own.constant = None
    values = own.__dict__.pop(_VALUES, None)
    if value is None:
        if values is not None:
            values.untyped_storage().resize_(0)
        return
    if values is not None and values.untyped_storage().nbytes():
        value = values.copy_(value)
    if is_mirrored:
        setattr(value.untyped_storage(), _MIRRORED, True)
    setattr(own, _VALUES, value)


def _fill(
    outputs: Sequence[torch.Tensor], arrives: Callable[[], Sequence[torch.Tensor] | None]
) -> None:
    with unset_fake_temporarily():
        found = arrives()
        parts = None if found is None else torch.cat([part.flatten() for part in found])
        for own in outputs:
            value = None
            if parts is not None:
                value, parts = parts[: own.numel()].view(own.shape), parts[own.numel() :]
            _write(own, None if value is None else value.clone())


def _await(tensors: Sequence[torch.Tensor]) -> None:
    for own in tensors if _awaited else ():
        if isinstance(own, FakeTensor):
            for fill in _awaited.pop(own.untyped_storage()._cdata, ()):
                fill()


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **kwargs}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    named = _named(func, args, kwargs)
    return [
        own
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for own in tensors_in(named.get(argument.name))
    ]
