"""Tensors without memory, and what is known of their values."""

# Note [Known values]
# Integers and booleans have values, and so do floats that follow from them and from constants, such
# as an optimizer's count of steps. Weights, activations and random floats have none. They are taken
# to be finite, so `isfinite` and comparisons with infinity are known.
# A collective on known values leaves what it would if every peer held the same, and these are
# marked, as is what is computed from them: reading them is recorded as an answer, since what a rank
# computes from its own number is another value on each.
# In a group whose ranks run, integers and booleans arrive, as objects do. They are awaited where
# they are first used: a rank that receives ahead of its use must not wait for the peer.

# Note [Declared routing]
# Experts are chosen by scores, which nobody knows, in one operation on their last dimension. With
# `simulation_splits` its indices have values, and what is counted, sorted and sent by them follows:
# the counts of all ranks fit together, as those of splits that are made up one by one would not.

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.kernels import set_compiler
from pytest_fsdp_comm.recording.operations import NAMESPACES, UNKNOWN, call_of, group_of, tensors_in
from pytest_fsdp_comm.recording.owners.stack import running
from pytest_fsdp_comm.recording.patches import hide_from_compiler
from pytest_fsdp_comm.recording.value_dependence import note_answer
from pytest_fsdp_comm.simulation import memory
from pytest_fsdp_comm.simulation.groups import RealGroups, mirrored
from pytest_fsdp_comm.simulation.memory import SimulationError, is_known, is_mirrored, is_whole

_CHOICES: Final = {
    torch.ops.aten.topk.default,
    torch.ops.aten.argmax.default,
    torch.ops.aten.max.dim,
}
"""The operations by which experts are chosen; the last that they return are indices."""
_ROUNDING: Final = 1e-9
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_DRAWS: Final = {
    *("bernoulli", "bernoulli_", "geometric", "geometric_", "multinomial"),
    *("randint", "randint_like", "random_", "randperm"),
}
"""Random operations whose results have values, if what they are given has."""
_SHAPED: Final = {
    *("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "randint_like"),
}
"""Operations that read no value of the tensor that they are given."""
_OVERWRITES: Final = {"bernoulli_", "copy_", "fill_", "random_", "zero_"}
_CHOOSES: Final = {"argmax", "argmin", "argsort", "max", "min", "multinomial", "sort", "topk"}
_COMPARES: Final = {"eq", "ne", "lt", "le", "gt", "ge"}
_ABSORBS: Final = {"bitwise_or": 1, "logical_or": 1, "bitwise_and": 0, "logical_and": 0}
"""The value of one argument that decides the result, whatever the other one is."""
_KEEP_STATISTICS: Final = {"native_batch_norm", "cudnn_batch_norm"}
_STATISTICS: Final = {"running_mean", "running_var"}
"""What these write, of which their schemas tell nothing."""
_ASKS_FINITE: Final = {"isnan", "isinf", "isposinf", "isneginf"}
_MARK: Final = "_fsdp_comm_device"
"""Of memory: the device that it would be on. See Note [Cuda without CUDA] in `devices.py`."""
CPU: Final = torch.device("cpu")
_SWAP: Final = torch.utils.swap_tensors
_DEVICE: Final = torch.ops.prim.device.default
_INDEX: Final = torch.ops.aten.index.Tensor
_SIZED: Final = {
    _INDEX,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._pack_padded_sequence.default,
    torch.ops.aten._ctc_loss.default,
    torch.ops.aten._ctc_loss.Tensor,
}
"""Operations whose first argument does not decide how many elements they return."""
_TRUTHS: Final = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
_READ: Final = torch.ops.aten._local_scalar_dense.default
_COPY: Final = torch.ops.aten.copy_.default
_MOST_ANSWERS: Final = 10_000
"""The most answers to one line in one test."""
_ADVICE: Final = {
    "floats": (
        "they follow from floats; let tokens, labels and counts follow from integers instead, such "
        "as torch.randint(vocabulary, (batch, length)) for a batch of tokens, or from the "
        "configuration"
    ),
    "matches": (
        "whether predictions are right follows from floats; leave the count to code that the test "
        "does not run, or log a mean, (a == b).float().mean(), which is a float and is answered"
    ),
    "scores": (
        "they are chosen by scores, which are floats; where a router chooses experts, declare "
        "their shares, simulation_splits='even', or let fixed numbers route, as a balanced routing "
        "does; where a model predicts tokens, use fixed ones, such as torch.randint"
    ),
    "size": memory.TOO_MANY,
    "peer": (
        "a rank that does not run would send them, such as a stage of a pipeline its shapes; have "
        "the ranks of that axis run, real={'pp': 4}, or send integers that this rank knows too"
    ),
    "strict": (
        "use simulate=True, which answers and records it in the snapshot, or leave the line to "
        "code that the test does not run"
    ),
}
"""What to do about unknown values, by why they are unknown."""
_awaited: Final[dict[int, list[Callable[[], None]]]] = {}
"""By the address of a storage, which these keep: what writes the values that arrive in it."""


_PLAIN: Final = frozenset(
    {
        *(bool, float, int, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
"""Of these, two of one type that are equal do the same."""
_PLAIN_TENSORS: Final = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
_LISTS: Final = frozenset({list, tuple, torch.Size})


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
    _is_composing = _OfThread(bool)
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
        self._answered: Counter[str] = Counter()
        SimulatedTensors.has_cuda = False
        _awaited.clear()

    def known(self, given: torch.Tensor) -> torch.Tensor:
        """A tensor with memory as one without, whose values are known unless it is large."""
        own = self.from_tensor(given)
        with unset_fake_temporarily():
            memory.put(own, given.clone())
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
        if self._is_composing:
            return self.dispatch(func, types, args, kwargs or {})
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
        # torch has not taken it apart, as in inference mode.
        if _is_composite(func) and all(own.__class__ in _PLAIN_TENSORS for own in given):
            with self:
                return func.decompose(*args, **kwargs)
        follows = all(map(is_known, given)) and not _is_made_up(func)
        if follows and func is _READ:  # torch would look for a note of its own
            return self._read(func, args, kwargs, given)
        try:
            result = self._shaped(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if follows:
                return self._read(func, args, kwargs, given)
            if func in _SIZED and all(map(is_known, filter(is_whole, given[1:]))):
                return self._size(func, args)
            return self._answer(func, args)
        except UnsupportedOperatorException:
            raise SimulationError(
                f"{find_call_site()} calls {func.namespace}.{func._opname}, which does not say "
                "what sizes it returns, and a simulated rank cannot run it: register a fake "
                "implementation with torch.library.register_fake, or run the test on real ranks, "
                "without simulate="
            ) from None
        if isinstance(func, OpOverload) and result is not NotImplemented:
            if not follows:
                self._follow(func, args, kwargs, given, result)
            elif _writes(func):
                memory.write(func, args, kwargs, given, _written(func, args, kwargs))
            else:
                memory.note(func, args, kwargs, given, _made(result))
        return result

    def _shaped(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        # torch may compose an operation of others, which show it alone what they write.
        self._is_composing = isinstance(func, OpOverload)
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self._is_composing = False

    def _follow(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        """Know what follows without all values; forget what is overwritten otherwise."""
        if func.namespace in NAMESPACES:
            self._communicate(func, args, kwargs, result)
        elif _writes(func):
            self._overwrite(func, args, kwargs, given)
        else:
            if self._shares is not None and func in _CHOICES:
                self._choose(_named(func, args, kwargs), result)
            made = _made(result)
            if made and is_whole(made[-1]):
                _deduce(func, args, kwargs, given, made)

    def _overwrite(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> None:
        is_filled = func._opname in _OVERWRITES and all(map(is_known, given[1:]))
        if is_filled and is_whole(args[0]) and memory.covers(args[0]):
            _zero(args[0])
            memory.write(func, args, kwargs, given, args[:1])
            return
        if any(_absorbs(func._opname[:-1], own, own.dtype) for own in given[:1]):
            return  # as "bitwise_or_" of True
        for own in _written(func, args, kwargs):
            memory.put(own, None)
            memory.explain(own, _reason(func._opname, args, given))
        if func is _UNSCALE:  # unknown gradients are finite
            _zero(args[1])

    def _read(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
    ) -> Any:
        if any(map(is_mirrored, given)):
            self._answer_mirrored(func, args)
        found = memory.read(func, args, kwargs, given)
        result = tree_map_only(torch.Tensor, self.from_tensor, found)
        for own, value in zip(_made(result), tensors_in(found), strict=True):
            memory.put(own, value, is_mirrored=any(map(is_mirrored, given)))
        return result

    def _size(self, func: Any, args: Sequence[Any]) -> Any:
        """Run an operation on values that are unknown, since others alone decide its sizes."""
        if func is _INDEX:  # by positions in place of masks, which takes no memory
            places: list[torch.Tensor | None] = []
            with self:
                for index in args[1]:
                    if index is None or not _is_mask(index):
                        places.append(index)
                    else:
                        places += index.nonzero().unbind(1)
                return torch.ops.aten.index.Tensor(args[0], places)
        others = tree_map_only(torch.Tensor, memory.real, args[1:])
        found = func(_blank(args[0], func._opname), *others)
        result = tree_map_only(torch.Tensor, self.from_tensor, found)
        for own, value in zip(_made(result), tensors_in(found), strict=True):
            if is_whole(value):
                memory.put(own, value)
        return result

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """As torch's, of which jagged tensors ask for a length: without symbols."""
        self.nt_tensor_id_counter += nt_tensor_id is None
        return torch._C._get_nested_int(nt_tensor_id or self.nt_tensor_id_counter - 1, 1)

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
            for own, other in zip(_made(result), tensors_in([*args, kwargs]), strict=False):
                memory.share(own, other)
            return
        bound, operation = call.bind(args, kwargs), call.operation
        group = group_of(bound)
        sent = operation.tensors_sent(bound)
        # The schemas of c10d tell of no writes.
        outputs = [*operation.tensors_received(bound, result), *_written(func, args, kwargs)]
        if operation.kind == "reduce" or operation.kind.startswith(UNKNOWN):
            outputs += sent
        held, reason = _held(sent, outputs)
        values: list[torch.Tensor | None] = [None] * len(outputs)
        if group is not None and self._groups is not None and self._groups.has(group):
            moved = [*sent, *outputs]
            is_exchanged = bool(moved) and is_whole(moved[0])
            exchange = self._groups.exchange
            arrives = exchange(operation, group, bound, held) if is_exchanged else None
            if arrives is not None:
                fill = functools.cache(functools.partial(_fill, outputs, arrives))
                for own in outputs:
                    _awaited.setdefault(own.untyped_storage()._cdata, []).append(fill)
                return
        elif group is not None and held:
            values = mirrored(operation.kind, group, bound, held, outputs)
        is_shared = group is not None and group.size() > 1
        for output, value in zip(outputs, values, strict=True):
            memory.put(output, value, is_mirrored=is_shared)
            memory.explain(output, reason)

    def _answer(self, func: Any, args: Sequence[Any]) -> bool | float:
        site, how = find_call_site(), _how(func)
        is_answered = _is_answered(func, args)
        if not (self._answers and is_answered):
            reason = next(filter(None, map(memory.reason_of, tensors_in(args))), "floats")
            advice = _ADVICE["strict" if is_answered else reason]
            raise SimulationError(
                f"{site} reads values of a tensor ({how}), which a simulated rank does not have: "
                f"{advice}; or run the test on real ranks, without simulate="
            ) from None
        is_number = args[0].dtype != torch.bool and func not in _TRUTHS
        answer = 1.0 if is_number else False
        self._answered[site] += 1
        if self._answered[site] > _MOST_ANSWERS:
            raise SimulationError(
                f"{site} has read unknown values ({how}) {_MOST_ANSWERS:_} times in this test, and "
                f"got {answer} each time, so that a loop which waits for another value does not "
                "end: bound the loop by a number of the configuration, leave it to code that the "
                "test does not run, or run the test on real ranks, without simulate="
            ) from None
        note_answer(answer, how)
        return answer

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
        fits = len(shares) == num_experts and 0 < indices.numel() <= memory.MAX_NUMEL
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
        memory.put(indices, chosen.clamp_(max=num_experts - 1).view(indices.shape))


def _is_answered(func: Any, args: Sequence[Any]) -> bool:
    # A made-up count would decide shapes. A number or a truth rarely decides what is sent.
    if func in _TRUTHS:
        return True
    dtype = args[0].dtype
    is_number = func is _READ
    return is_number and (dtype.is_floating_point or dtype == torch.bool)


def _how(func: Any) -> str:
    name = str(func.overloadpacket.__name__)
    return {"_local_scalar_dense": "item", "index": "a boolean mask"}.get(name, name)


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


def _held(
    sent: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor] | None, str]:
    """The values that a collective sends, None if unknown; and why those that it leaves are."""
    if not all(map(is_known, sent)):
        return None, next(filter(None, map(memory.reason_of, sent)), "peer")
    if memory.are_too_many([*sent, *outputs]):
        return None, "size"
    return [*map(memory.real, sent)], "peer"


@functools.cache
def _is_composite(func: Any) -> bool:
    # Some that ask for sizes are not registered at all.
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func._schema.name):
        return False
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


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
    """Whether results have no values even if those of all arguments are known."""
    if not isinstance(func, OpOverload) or func.namespace in NAMESPACES:
        return True
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags and func._opname not in _DRAWS
    return is_drawn or "empty" in func._opname


@functools.cache
def _writes(func: Any) -> bool:
    # The schemas of those that communicate tell of no writes.
    return isinstance(func, OpOverload) and (
        func._schema.is_mutable or func.namespace in NAMESPACES or func._opname in _KEEP_STATISTICS
    )


def _deduce(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    made: Sequence[FakeTensor],
) -> None:
    """Know the integers or booleans that an operation makes, if it needs no unknown value."""
    name = func._opname
    if "empty" in name:  # what it holds on a real rank is left to chance
        _zero(made[0])
    elif name in _SHAPED:
        blanks = [_blank(own, name) for own in args]
        memory.note(func, blanks, kwargs, (), made)
    elif name in _ASKS_FINITE or (name in _COMPARES and _is_bound(*args)):
        zero = torch.zeros((), device="cpu")
        truth = func(*(zero if isinstance(own, torch.Tensor) else own for own in args))
        memory.note(truth.expand, [made[0].shape], {}, (), made)
    elif any(_absorbs(name, own, made[0].dtype) for own in given):
        truth = torch.full((), _ABSORBS[name], dtype=made[0].dtype, device="cpu")
        memory.note(truth.expand, [made[0].shape], {}, [*filter(is_known, given)], made)
    else:
        for own in made:
            memory.explain(own, _reason(name, args, given))


def _absorbs(name: str, own: torch.Tensor, to: torch.dtype) -> bool:
    """Whether an argument is known and decides the whole result, as True does for an or."""
    value = _ABSORBS.get(name)  # of integers, only zeros decide
    if value is None or (value and to != torch.bool) or not is_known(own):
        return False
    return not memory.are_too_many([own]) and bool((memory.real(own) == value).all())


def _is_bound(one: Any, other: Any) -> bool:
    """Whether a comparison has one result for all finite numbers."""
    return one is other or (isinstance(other, float) and not math.isfinite(other))


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in {torch.bool, torch.uint8}


def _zero(own: torch.Tensor) -> None:
    if isinstance(own, FakeTensor):
        memory.put(own, None)
        zeros = functools.partial(torch.zeros, dtype=own.dtype, device="cpu")
        memory.note(zeros, [own.shape], {}, (), [own])


def _blank(own: Any, name: str) -> Any:
    """Stand in for a tensor of which only type and shape are read."""
    if not isinstance(own, torch.Tensor):
        return own
    shape = () if name.startswith("new_") else own.shape
    return torch.zeros((), dtype=own.dtype, device="cpu").expand(shape)


def _reason(name: str, args: Sequence[Any], given: Sequence[torch.Tensor]) -> str:
    """Why the integers or booleans that an operation makes are unknown: a key of `_ADVICE`."""
    if name in {"eq", "ne"} and isinstance(args[1], torch.Tensor):
        return "matches"
    known = next(filter(None, map(memory.reason_of, given)), None)
    return known or ("scores" if name in _CHOOSES else "floats")


def is_own(tensor: torch.Tensor) -> bool:
    """Whether values are known that other ranks have no part in, or have truly sent."""
    _await([tensor])
    return is_known(tensor) and not is_mirrored(tensor)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that is known; the tensor itself if they are not."""
    _await([tensor])
    return memory.real(tensor)


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
            memory.put(own, None if value is None else value.clone())
            memory.explain(own, "peer")


def _await(tensors: Sequence[torch.Tensor]) -> None:
    for own in tensors if _awaited else ():
        if isinstance(own, FakeTensor):
            for fill in _awaited.pop(own.untyped_storage()._cdata, ()):
                fill()


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **kwargs}


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    named = _named(func, args, kwargs)
    statistics = _STATISTICS if func._opname in _KEEP_STATISTICS else ()
    return [
        own
        for argument in func._schema.arguments
        if argument.name in statistics
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for own in tensors_in(named.get(argument.name))
    ]
