"""Simulates tensors that have no memory, and computes their values where that is possible."""

# Note [Known values]
# Values that depend only on integers, booleans and constants are known, for example an optimizer's
# step count. Weights, activations and random floats are unknown, but assumed to be finite, so
# `isfinite` and comparisons with infinity are known. A single number from `uniform_` is drawn,
# because augmentations such as torchvision's ColorJitter check its range.
# The result of a collective on known values is computed as if every peer had sent the same values.
# The result, and everything computed from it, is marked as mirrored. Reading a mirrored value is
# recorded as an assumption, because the peers' values could differ on real ranks.
# Peers along the axes of ``real=`` do run, and exchange integers, booleans and objects with this
# rank. This rank does not wait for a peer's values in the collective, but when they are first used,
# because code can call a receive long before it needs the values.

# Note [Declared routing]
# A router chooses experts with one operation on the last dimension of a tensor of scores, which are
# unknown. With `simulation_splits`, the indices that the operation returns are known, and so are
# the counts, sorted orders and split sizes computed from them. If each count were assumed
# separately, the counts of different ranks would contradict each other.

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
from torch._subclasses import fake_tensor
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
from pytest_fsdp_comm.recording.kernels import run_and_record, set_compiler
from pytest_fsdp_comm.recording.operations import NAMESPACES, UNKNOWN, call_of, group_of, tensors_in
from pytest_fsdp_comm.recording.owners.stack import running_modules
from pytest_fsdp_comm.recording.patches import hide_package_from_compiler
from pytest_fsdp_comm.recording.value_dependence import add_assumption, is_mask, name_of_read
from pytest_fsdp_comm.simulation import memory
from pytest_fsdp_comm.simulation.groups import RealGroups, mirror_outputs
from pytest_fsdp_comm.simulation.memory import (
    OperatorCall,
    SimulationError,
    has_integral_dtype,
    is_known,
    is_mirrored,
)
from pytest_fsdp_comm.simulation.streams import (
    count_waits_as,
    current_order,
    find_way_of_read,
    is_called_by_user,
    note_wait_of_read,
    wait_on_host,
)

_CHOICES: Final = {
    torch.ops.aten.topk.default,
    torch.ops.aten.argmax.default,
    torch.ops.aten.max.dim,
}
"""Operations with which routers choose experts; the last output has the experts' indices."""
_ROUNDING: Final = 1e-9
_UNSCALE: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_DRAWS: Final = {
    *("bernoulli", "bernoulli_", "geometric", "geometric_", "multinomial"),
    *("randint", "randint_like", "random_", "randperm"),
}
"""Random operations whose results count as known if their arguments are known."""
_SHAPED: Final = {
    *("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "randint_like"),
}
"""Operations that read only the shape and dtype of a tensor argument, not its values."""
_OVERWRITES: Final = {"bernoulli_", "copy_", "fill_", "random_", "zero_"}
_CHOOSES: Final = {"argmax", "argmin", "argsort", "max", "min", "multinomial", "sort", "topk"}
_COMPARES: Final = {"eq", "ne", "lt", "le", "gt", "ge"}
_ABSORBS: Final = {"bitwise_or": 1, "logical_or": 1, "bitwise_and": 0, "logical_and": 0}
"""For each operation, the value that determines the result if either argument has it."""
_KEEP_STATISTICS: Final = {"native_batch_norm", "cudnn_batch_norm"}
_STATISTICS: Final = {"running_mean", "running_var"}
"""Arguments that `_KEEP_STATISTICS` operations overwrite without declaring it in their schemas."""
_ASKS_FINITE: Final = {"isnan", "isinf", "isposinf", "isneginf"}
_WAITING: Final = {"c10d", "_dtensor", "symm_mem"}
"""Namespaces whose operations return a `Work`, or wait for the result themselves."""
_EXCHANGE_SHARDS: Final = torch.ops._dtensor.shard_dim_alltoall.default
_MARK: Final = "_fsdp_comm_device"
"""Attribute of a storage that holds its simulated device; see Note [Cuda without CUDA]."""
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
"""Operations whose result size does not depend on the values of their first argument."""
_TRUTHS: Final = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
_READ: Final = torch.ops.aten._local_scalar_dense.default
_COPY: Final = torch.ops.aten.copy_.default
_TO_COPY: Final = torch.ops.aten._to_copy.default
_MOST_ASSUMED: Final = 10_000
"""Maximum number of unknown values that a line of code can read per test; reading more raises."""
_ADVICE: Final = {
    "floats": (
        "they depend on floats. Compute tokens, labels and counts from integers (for example "
        "torch.randint(vocabulary, (batch, length)) for tokens) or from configuration values"
    ),
    "matches": (
        "whether a prediction is correct depends on floats. Log the mean, (a == b).float().mean(), "
        "for which a simulation assumes a value, count correct predictions in code that the test "
        "does not run"
    ),
    "scores": (
        "they are chosen by scores, which are floats. If a router chooses experts, declare their "
        "shares (simulation_splits='even') or use balanced routing; if a model predicts tokens, "
        "use fixed tokens, for example from torch.randint"
    ),
    "size": memory.TOO_MANY,
    "peer": (
        "they come from a rank that does not run, for example the shapes of a pipeline stage. Run "
        "the ranks of that axis (for example real={'pp': 4}), send integers that this rank knows"
    ),
    "strict": (
        "simulate='strict' assumes no values. Use simulate=True, which assumes a value and "
        "records it in the snapshot, move the line to code that the test does not run"
    ),
}
"""For each reason why values are unknown: an explanation for the user, and remedies."""
_awaited: Final[dict[int, list[Callable[[], None]]]] = {}
"""Functions that write received values into a storage, keyed by the storage's address. Each
function holds a reference to the storage, so that no other storage can get the same address."""


_PLAIN: Final = frozenset(
    {
        *(bool, float, int, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
"""Types of arguments that a key of torch's fake tensor cache can contain unchanged."""
# torch 2.7 requires its own key class, which is slower to hash.
_KEY_TYPE: Final = (
    tuple if hasattr(fake_tensor, "_set_cache_key") else fake_tensor._DispatchCacheKey
)
_PLAIN_TENSORS: Final = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
_LISTS: Final = frozenset({list, tuple, torch.Size})


class _ThreadLocal:
    def __init__(self, make: Callable[[], object]) -> None:
        self._make, self._held = make, threading.local()

    def __get__(self, _: object, __: type) -> Any:
        if not hasattr(self._held, "value"):
            self._held.value = self._make()
        return self._held.value

    def __set__(self, _: object, value: object) -> None:
        self._held.value = value


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A mode in which new tensors have no memory. See Note [Known values]."""

    has_marks = False
    has_cuda = False
    # torch stores these attributes in the mode, which all threads share here, so store them
    # separately for each thread.
    in_kernel_invocation = _ThreadLocal(bool)
    enter_stack = _ThreadLocal(list)
    _is_composing = _ThreadLocal(bool)
    supports_higher_order_operators = True

    def __init__(self, *, assumes: bool, shares: tuple[float, ...] | None = None) -> None:
        hide_package_from_compiler()
        # Accept real tensors, which were created before the simulation, for example as globals of a
        # test module. Their values are known.
        super().__init__(allow_non_fake_inputs=True)
        self._assumes = assumes
        self._shares = shares
        self.begin_test(None)

    def begin_test(self, groups: RealGroups | None) -> None:
        """Begin a test; `groups` exchanges values with peers that run (None without ``real=``)."""
        self._groups = groups
        self._num_assumed: Counter[str] = Counter()
        SimulatedTensors.has_cuda = False
        _awaited.clear()

    def simulate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a simulated copy of a real tensor; its values are known unless it is too large."""
        simulated = self.from_tensor(tensor)
        if tensor.numel() > memory.MAX_NUMEL:
            memory.set_values(simulated, memory.Values.make_too_large())
            return simulated
        with unset_fake_temporarily():
            memory.copy_value_into(simulated, tensor.clone())
        return simulated

    @staticmethod
    def _should_skip_dynamo() -> bool:
        # Without this, torch would disable the compiler around each operation, which takes as long
        # as the operation.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Return early in the two most frequent cases: half of all operations in a step read a
        # device, and an eighth have DTensors as arguments.
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if DTensor in types:
            return NotImplemented
        if self._is_composing:
            return self.dispatch(func, types, args, kwargs or {})
        kwargs = kwargs or {}
        tensors = _list_tensor_arguments(args) + _list_tensor_arguments(kwargs.values())
        op = OperatorCall(func, args, kwargs, types, tensors)
        compiler = set_compiler(None)
        try:
            return self._dispatch_with_device_marks(op)
        finally:
            set_compiler(compiler)

    def _dispatch_with_device_marks(self, op: OperatorCall) -> object:
        requested = op.kwargs.get("device")
        if requested is not None and (
            (requested.type == "cuda" and not torch.cuda.is_available())
            or (requested.type == "cpu" and requested.index is not None)
        ):
            op = op._replace(kwargs={**op.kwargs, "device": CPU})
        if op.func is _TO_COPY and requested is not None and requested.type == "cpu":
            requested = None  # torch names the device even if it only changes the dtype
        custom = _find_custom_op_implementation(op.func)
        if custom and _has_group_name((*op.args, *op.kwargs.values())):
            with self:
                return custom(*op.args, **op.kwargs)
        _await_values(op.tensors)
        order = current_order()
        if order is not None:
            order.wait_before_use(op)
            _note_host_wait(op)
        if not (self.has_marks or requested):
            return self._run_and_set_values(op)
        marked = () if op.func is _COPY else op.tensors
        marks = [requested] if requested else [*filter(None, map(marked_device, marked))]
        result = self._run_and_set_values(op)
        if marks and marks[0].type == "cuda":
            written = op.tensors if _has_written_arguments(op.func) else ()
            for tensor in (*_list_fake_tensors(result), *written):
                mark_with_device(tensor, marks[0])
        elif requested:  # unmark the result, which may be based on a marked copy
            for tensor in _list_fake_tensors(result):
                remove_device_mark(tensor)
        return result

    def _run_and_set_values(self, op: OperatorCall) -> object:
        func, tensors = op.func, op.tensors
        # Decompose composite operations here, because torch does not decompose them in inference
        # mode.
        if _is_composite(func) and all(tensor.__class__ in _PLAIN_TENSORS for tensor in tensors):
            with self:
                return func.decompose(*op.args, **op.kwargs)
        follows = all(map(is_known, tensors)) and not _has_unknown_result(func)
        if follows and func is _READ:  # torch would read only `FakeTensor.constant`
            return self._run_on_known_values(op)
        try:
            result = self._dispatch_to_fake_kernel(op)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if follows:
                return self._run_on_known_values(op)
            if func in _SIZED and all(map(is_known, filter(has_integral_dtype, tensors[1:]))):
                return self._run_with_known_size(func, op.args)
            return self._assume_or_refuse_read(func, op.args)
        except UnsupportedOperatorException:
            raise SimulationError(
                f"{find_call_site()} calls {func.namespace}.{func._opname}, which has no fake "
                "implementation, so a simulated rank cannot know the shape of its result: register "
                "a fake implementation with torch.library.register_fake, or run the test on real "
                "ranks, without simulate="
            ) from None
        if isinstance(func, OpOverload) and result is not NotImplemented:
            if not follows:
                self._set_partly_known_results(op, result)
            elif _has_written_arguments(func):
                memory.run_write(op, _list_written_tensors(op))
            else:
                memory.set_output_values(op, _list_fake_tensors(result))
        return result

    def _dispatch_to_fake_kernel(self, op: OperatorCall) -> object:
        # torch may decompose this operation. `_is_composing` makes `__torch_dispatch__` pass the
        # inner operations straight to torch, because we handle only the outer operation.
        self._is_composing = isinstance(op.func, OpOverload)
        try:
            if op.func is _EXCHANGE_SHARDS:
                result = self._exchange_shards(op)
            else:
                result = self.dispatch(op.func, op.types, op.args, op.kwargs)
        finally:
            self._is_composing = False
        order = current_order()
        if order is not None and result is not NotImplemented:
            if op.func is _EXCHANGE_SHARDS:
                order.wait_for_latest()  # as the operation does (read in torch 2.7 to 2.15)
            order.note_computation(op, result)
        return result

    def _exchange_shards(self, op: OperatorCall) -> object:
        # torch runs this operation's fake kernel without the recorder's kernel.
        run = functools.partial(self.dispatch, op.func, op.types, op.args, op.kwargs)
        call = call_of(op.func)
        return run() if call is None else run_and_record(call, op.args, dict(op.kwargs), run)

    def _set_partly_known_results(self, op: OperatorCall, result: object) -> None:
        """Set the results that are known despite unknown inputs; forget overwritten values."""
        if op.func.namespace in NAMESPACES:
            self._set_collective_results(op, result)
        elif _has_written_arguments(op.func):
            _set_or_forget_overwritten(op)
        else:
            if self._shares is not None and op.func in _CHOICES:
                self._set_chosen_experts(_bind_arguments(op), result)
            outputs = _list_fake_tensors(result)
            if outputs and has_integral_dtype(outputs[-1]):
                _set_deducible_outputs(op, outputs)

    def _run_on_known_values(self, op: OperatorCall) -> object:
        is_from_peers = any(map(is_mirrored, op.tensors))
        if is_from_peers:
            self._note_or_refuse_mirrored_read(op.func, op.args)
        values = memory.run_read(op)
        result = tree_map_only(torch.Tensor, self.from_tensor, values)
        for tensor, value in zip(_list_fake_tensors(result), tensors_in(values), strict=True):
            memory.copy_value_into(tensor, value, is_mirrored=is_from_peers)
        return result

    def _run_with_known_size(self, func: OpOverload, args: Sequence[Any]) -> object:
        """Run an operation of `_SIZED`, whose result has a known size despite unknown values."""
        if func is _INDEX:  # convert masks to indices, for which torch needs no memory
            indices: list[torch.Tensor | None] = []
            with self:
                for index in args[1]:
                    if is_mask(index):
                        with count_waits_as():  # counted as a read by mask
                            indices += index.nonzero().unbind(1)
                    else:
                        indices.append(index)
                return torch.ops.aten.index.Tensor(args[0], indices)
        arguments = tree_map_only(torch.Tensor, memory.view_known_values, args[1:])
        values = func(_replace_with_zeros(args[0], func._opname), *arguments)
        result = tree_map_only(torch.Tensor, self.from_tensor, values)
        for tensor, value in zip(_list_fake_tensors(result), tensors_in(values), strict=True):
            if has_integral_dtype(value):
                memory.copy_value_into(tensor, value)
        return result

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """Return the length of a jagged dimension; torch's method creates a symbolic length."""
        self.nt_tensor_id_counter += nt_tensor_id is None
        return torch._C._get_nested_int(nt_tensor_id or self.nt_tensor_id_counter - 1, 1)

    # This overrides a private method (checked in torch 2.13). If torch renames that method, torch's
    # slower code runs instead.
    def _cache_key(
        self, state: Any, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """Build most cache keys faster than torch does, which saves a sixth of a step's time."""
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        key.append(torch.is_inference_mode_enabled())
        if self._add_to_key(key, args) and self._add_to_key(key, [*kwargs, *kwargs.values()]):
            return _KEY_TYPE(tuple(key))
        return super()._cache_key(state, func, args, kwargs)

    def _add_to_key(self, key: list[object], args: Sequence[Any]) -> bool:
        """Add the properties of `args` to `key`; return False if only torch can build the key."""
        key.append(len(args))
        for arg in args:
            kind = type(arg)
            key.append(kind)
            if kind is FakeTensor:
                if (
                    arg.constant is not None
                    or arg.fake_mode is not self
                    or arg.layout is not torch.strided
                    or arg._has_symbolic_sizes_strides
                    or arg.is_quantized
                ):
                    return False
                key += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device)
                key += (arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_conj())
                key += (arg.is_neg(), arg.is_inference())
            elif kind in _PLAIN:
                key.append(arg)
            elif kind not in _LISTS or not self._add_to_key(key, arg):
                return False
        return True

    def swap(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Swap two tensors, as torch does for `Module.to` and ``to_empty``."""
        if (
            isinstance(first, FakeTensor)
            and isinstance(second, FakeTensor)
            and first.fake_device == second.fake_device
        ):
            # Outside a simulation, torch sets the data, which keeps the attributes of a parameter
            # and works if a graph saved it.
            first.data = second
            return
        # Drop torch's weak references to tensors that were created on meta, because tensors with
        # weak references cannot be swapped.
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        _SWAP(first, second)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _set_collective_results(self, op: OperatorCall, result: object) -> None:
        """Set the results of a collective if its inputs are known. See Note [Known values]."""
        call = call_of(op.func)
        if call is None:  # the operation waits for a collective, or wraps its result
            for tensor, source in zip(_list_fake_tensors(result), op.tensors, strict=False):
                memory.share_values(tensor, source)
            return
        bound, operation = call.bind(op.args, op.kwargs), call.operation
        order = current_order()
        if order is not None and op.func.namespace not in _WAITING:
            order.track_functional_results(operation.tensors_received(bound, result))
        group = group_of(bound)
        sent = operation.tensors_sent(bound)
        # Combine the lists, because the schemas of c10d do not declare all writes.
        outputs = [*operation.tensors_received(bound, result), *_list_written_tensors(op)]
        if operation.kind == "reduce" or operation.kind.startswith(UNKNOWN):
            outputs += sent
        values_sent, reason = _find_sent_values(sent, outputs)
        values: list[torch.Tensor | None] = [None] * len(outputs)
        if group is not None and self._groups is not None and self._groups.has_ranks_of(group):
            moved = [*sent, *outputs]
            is_exchanged = bool(moved) and has_integral_dtype(moved[0])
            exchange = self._groups.exchange
            arrives = exchange(operation, group, bound, values_sent) if is_exchanged else None
            if arrives is not None:
                fill = functools.cache(
                    functools.partial(_fill_with_received_values, outputs, arrives)
                )
                for tensor in outputs:
                    _awaited.setdefault(tensor.untyped_storage()._cdata, []).append(fill)
                return
        elif group is not None and values_sent:
            values = mirror_outputs(operation.kind, group, bound, values_sent, outputs)
        is_shared = group is not None and group.size() > 1
        for output, value in zip(outputs, values, strict=True):
            memory.copy_value_into(output, value, is_mirrored=is_shared)
            memory.store_unknown_reason(output, reason)

    def _assume_or_refuse_read(self, func: OpOverload, args: Sequence[Any]) -> bool | float:
        site, how = find_call_site(), name_of_read(func)
        can_assume = _can_assume_value(func, args)
        if not (self._assumes and can_assume):
            reason = next(filter(None, map(memory.read_unknown_reason, tensors_in(args))), "floats")
            advice = _ADVICE["strict" if can_assume else reason]
            raise SimulationError(
                f"{site} reads tensor values ({how}) that a simulated rank cannot compute: "
                f"{advice}, or run the test on real ranks, without simulate="
            ) from None
        is_number = args[0].dtype != torch.bool and func not in _TRUTHS
        value = 1.0 if is_number else False
        self._num_assumed[site] += 1
        if self._num_assumed[site] > _MOST_ASSUMED:
            raise SimulationError(
                f"{site} has read unknown values ({how}) {_MOST_ASSUMED:_} times in this test, and "
                f"got {value} each time. A loop that waits for a different value would never end: "
                "bound it with a value from your configuration, move it to code that the test does "
                "not run, or run the test on real ranks, without simulate="
            ) from None
        add_assumption(value, how)
        return value

    def _note_or_refuse_mirrored_read(self, func: OpOverload, args: Sequence[object]) -> None:
        """Record a read of mirrored values as an assumption, or raise under ``strict``."""
        if self._shares is not None and running_modules():
            return  # simulation_splits declares that all ranks route in the same way
        if not self._assumes:
            raise SimulationError(
                f"{find_call_site()} reads values that other ranks would have sent "
                f"({name_of_read(func)}). "
                "A simulated rank can only assume that all ranks hold the same values. If they do, "
                "as with balanced routing, use simulation_splits='even' or simulate=True; "
                "otherwise run the test on real ranks, without simulate="
            ) from None
        # An integer can also affect communication after this block, so add it to later recordings.
        add_assumption("mirrored", name_of_read(func), of_process=not _can_assume_value(func, args))

    def _set_chosen_experts(self, named: Mapping[str, Any], result: object) -> None:
        """Set the indices of the chosen experts. See Note [Declared routing]."""
        scores, indices = named["self"], _list_fake_tensors(result)[-1]
        num_experts, k = scores.shape[-1] if scores.dim() else 0, named.get("k", 1)
        shares = self._shares or (1.0,) * num_experts
        is_last = named.get("dim", -1 if "k" in named else None) in {-1, scores.dim() - 1}
        fits = 0 < num_experts == len(shares) and 0 < indices.numel() <= memory.MAX_NUMEL
        if not (is_last and fits and scores.is_floating_point()):
            return
        most = max(shares) / sum(shares)
        if most * k > 1 + _ROUNDING:
            raise SimulationError(
                f"{find_call_site()} chooses {k} of {num_experts} experts for each token, so the "
                f"share of an expert is at most {1 / k:.3g}, but simulation_splits has a share of "
                f"{most:.3g}: use smaller shares, or 'even'"
            )
        # Spread all choices evenly over the cumulative shares, and the choices of each token as far
        # apart as possible, so that no token gets the same expert twice.
        total = indices.numel()
        order = torch.arange(total, device="cpu").view(k, -1).T.flatten()
        limits = torch.tensor(shares, device="cpu", dtype=torch.float64).cumsum(0)
        chosen = torch.searchsorted(limits, (order + 0.5) / total * limits[-1], right=True)
        memory.copy_value_into(indices, chosen.clamp_(max=num_experts - 1).view(indices.shape))


def _can_assume_value(func: OpOverload, args: Sequence[Any]) -> bool:
    # Assume only floats and booleans, which rarely affect communication. Assumed integers would
    # affect it, because they determine shapes.
    if func in _TRUTHS:
        return True
    dtype = args[0].dtype
    is_number = func is _READ
    return is_number and (dtype.is_floating_point or dtype == torch.bool)


def mark_with_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Mark the storage of a simulated tensor with a device."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
        _attributes_holding_mark(tensor)[_MARK] = device
        SimulatedTensors.has_marks = SimulatedTensors.has_cuda = True


def marked_device(tensor: torch.Tensor) -> torch.device | None:
    """Return the device that a simulated tensor is marked with; None if it is not marked."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(tensor, FakeTensor):
        return None
    return _attributes_holding_mark(tensor).get(_MARK)


def remove_device_mark(tensor: torch.Tensor) -> None:
    """Remove the mark of a simulated tensor, which then is on the CPU."""
    _attributes_holding_mark(tensor).pop(_MARK, None)


def _attributes_holding_mark(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that hold a tensor's mark; a sparse tensor has no storage."""
    return memory.storage_attributes(tensor) if tensor.layout is torch.strided else vars(tensor)


def _note_host_wait(op: OperatorCall) -> None:
    """Note that the host waits, if an operation reads values, or copies them from or to the GPU."""
    # `devices` notes copies by `Tensor.to`.
    if op.func is _COPY:
        is_to_gpu, is_of_gpu = (marked_device(tensor) is not None for tensor in op.args[:2])
        is_blocking = not (op.kwargs.get("non_blocking") or op.args[2:3] == (True,))
        # To torch itself, all tensors are on the CPU, so its own copies stay on the GPU.
        if is_to_gpu != is_of_gpu and is_blocking and is_called_by_user():
            wait_on_host("copy_to_device" if is_to_gpu else "copy_to_host")
    elif find_way_of_read(op.func) is not None:
        is_on_gpu = any(map(marked_device, op.tensors)) if SimulatedTensors.has_cuda else None
        note_wait_of_read(op, is_on_gpu=is_on_gpu)


def _list_tensor_arguments(args: Iterable[object]) -> list[torch.Tensor]:
    # Do not use torch's tree_leaves, which would take a fifth of a step's time.
    tensors = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors += _list_tensor_arguments(arg)
    return tensors


def _list_fake_tensors(result: object) -> list[FakeTensor]:
    if isinstance(result, FakeTensor):
        return [result]
    return [tensor for tensor in tensors_in(result) if isinstance(tensor, FakeTensor)]


def _find_sent_values(
    sent: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor] | None, str]:
    """Return a collective's inputs, or None if unknown, and the reason for any unknown results."""
    if not all(map(is_known, sent)):
        return None, next(filter(None, map(memory.read_unknown_reason, sent)), "peer")
    if memory.has_too_many_elements([*sent, *outputs]):
        return None, "size"
    return [*map(memory.view_known_values, sent)], "peer"


@functools.cache
def _is_composite(func: object) -> bool:
    # Check for kernels first, because some operations that read sizes have no kernel at all.
    if not isinstance(func, OpOverload) or not torch._C._dispatch_has_kernel(func._schema.name):
        return False
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _find_custom_op_implementation(func: object) -> Callable[..., object] | None:
    """Return a custom operator's real implementation, because the fake one does not communicate."""
    operator = OPDEFS.get(func._schema.name) if isinstance(func, OpOverload) else None
    return operator._init_fn if operator else None


def _has_group_name(args: Iterable[object]) -> bool:
    names = {*distributed_c10d._world.pg_names.values()}
    return any(isinstance(arg, str) and arg in names for arg in args)


@functools.cache
def _has_unknown_result(func: object) -> bool:
    """Return whether the results are unknown even if all arguments are known."""
    if not isinstance(func, OpOverload) or func.namespace in NAMESPACES:
        return True
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags and func._opname not in _DRAWS
    return is_drawn or "empty" in func._opname


@functools.cache
def _has_written_arguments(func: object) -> bool:
    # The schemas of collectives do not declare all writes, so assume that every collective writes.
    return isinstance(func, OpOverload) and (
        func._schema.is_mutable or func.namespace in NAMESPACES or func._opname in _KEEP_STATISTICS
    )


def _set_or_forget_overwritten(op: OperatorCall) -> None:
    name, first = op.func._opname, op.args[0]
    is_drawn = name == "uniform_" and first.numel() == 1 and not first.requires_grad
    is_filled = name in _OVERWRITES and all(map(is_known, op.tensors[1:]))
    is_set = is_drawn or (is_filled and has_integral_dtype(first))
    if is_set and memory.is_covering_whole_storage(first):
        _set_to_zero(first)
        memory.run_write(op, [first])
        return
    if any(_is_absorbing_operand(name[:-1], tensor, tensor.dtype) for tensor in op.tensors[:1]):
        return  # the result is known, as in True.bitwise_or_(unknown)
    for tensor in _list_written_tensors(op):
        memory.copy_value_into(tensor, None)
        memory.store_unknown_reason(tensor, _find_unknown_reason(op))
    if op.func is _UNSCALE:  # unknown gradients count as finite
        _set_to_zero(op.args[1])


def _set_deducible_outputs(op: OperatorCall, outputs: Sequence[FakeTensor]) -> None:
    """Set integer or boolean outputs that are known despite unknown inputs, or store why not."""
    name, args = op.func._opname, op.args
    if "empty" in name:  # uninitialized on a real rank, so any value will do
        _set_to_zero(outputs[0])
    elif name in _SHAPED:
        blanks = [_replace_with_zeros(arg, name) for arg in args]
        memory.set_output_values(OperatorCall(op.func, blanks, op.kwargs), outputs)
    elif name in _ASKS_FINITE or (name in _COMPARES and _is_same_for_finite_values(*args)):
        zero = torch.zeros((), device="cpu")
        truth = op.func(*(zero if isinstance(arg, torch.Tensor) else arg for arg in args))
        memory.set_output_values(OperatorCall(truth.expand, [outputs[0].shape], {}), outputs)
    elif any(_is_absorbing_operand(name, tensor, outputs[0].dtype) for tensor in op.tensors):
        truth = torch.full((), _ABSORBS[name], dtype=outputs[0].dtype, device="cpu")
        fill = OperatorCall(truth.expand, [outputs[0].shape], {})
        known = [*filter(is_known, op.tensors)]
        memory.set_output_values(fill._replace(tensors=known), outputs)
    else:
        for tensor in outputs:
            memory.store_unknown_reason(tensor, _find_unknown_reason(op))


def _is_absorbing_operand(name: str, tensor: torch.Tensor, to: torch.dtype) -> bool:
    """Return whether this argument alone determines the result, as True does in ``True or x``."""
    value = _ABSORBS.get(name)  # among integers, only zero absorbs
    if value is None or (value and to != torch.bool) or not is_known(tensor):
        return False
    return not memory.has_too_many_elements([tensor]) and bool(
        (memory.view_known_values(tensor) == value).all()
    )


def _is_same_for_finite_values(left: object, right: object) -> bool:
    """Return whether a comparison has the same result for all finite tensor values."""
    return left is right or (isinstance(right, float) and not math.isfinite(right))


def _set_to_zero(tensor: torch.Tensor) -> None:
    if isinstance(tensor, FakeTensor):
        memory.copy_value_into(tensor, None)
        options = {"dtype": tensor.dtype, "device": "cpu"}
        memory.set_output_values(OperatorCall(torch.zeros, [tensor.shape], options), [tensor])


def _replace_with_zeros(tensor: object, name: str) -> object:
    """Return zeros in place of a tensor whose values are not read; return other types unchanged."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    shape = () if name.startswith("new_") else tensor.shape
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(shape)


def _find_unknown_reason(op: OperatorCall) -> str:
    """Return why integers or booleans in a result are unknown, as a key of `_ADVICE`."""
    if op.func._opname in {"eq", "ne"} and isinstance(op.args[1], torch.Tensor):
        return "matches"
    reason = next(filter(None, map(memory.read_unknown_reason, op.tensors)), None)
    return reason or ("scores" if op.func._opname in _CHOOSES else "floats")


def is_known_without_peers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are known without assumptions about other ranks."""
    _await_values([tensor])
    return is_known(tensor) and not is_mirrored(tensor)


def await_and_view_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory that holds the values, or `tensor` if they are unknown."""
    _await_values([tensor])
    return memory.view_known_values(tensor)


def _fill_with_received_values(
    outputs: Sequence[torch.Tensor], arrives: Callable[[], Sequence[torch.Tensor] | None]
) -> None:
    with unset_fake_temporarily():
        values = arrives()
        parts = None if values is None else torch.cat([part.flatten() for part in values])
        for tensor in outputs:
            value = None
            if parts is not None:
                value, parts = parts[: tensor.numel()].view(tensor.shape), parts[tensor.numel() :]
            memory.copy_value_into(tensor, None if value is None else value.clone())
            memory.store_unknown_reason(tensor, "peer")


def _await_values(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors if _awaited else ():
        if isinstance(tensor, FakeTensor):
            for fill in _awaited.pop(tensor.untyped_storage()._cdata, ()):
                fill()


def _bind_arguments(op: OperatorCall) -> dict[str, object]:
    names = (argument.name for argument in op.func._schema.arguments)
    return {**dict(zip(names, op.args, strict=False)), **op.kwargs}


def _list_written_tensors(op: OperatorCall) -> list[Any]:
    named = _bind_arguments(op)
    statistics = _STATISTICS if op.func._opname in _KEEP_STATISTICS else ()
    return [
        tensor
        for argument in op.func._schema.arguments
        if argument.name in statistics
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for tensor in tensors_in(named.get(argument.name))
    ]
