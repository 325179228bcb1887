"""Replaces the reducer of DistributedDataParallel, because torch's needs tensors with memory."""

# DDP asks a reducer to all-reduce gradients. torch's reducer is C++ code that reads and writes
# memory (torch/csrc/distributed/c10d/reducer.cpp); `SimulatedReducer` issues the same collectives
# in the same order, as read and compared in torch 2.13:
# - A bucket holds the gradients of several parameters in one flat tensor. It is all-reduced once
#   all of its gradients have arrived and all earlier buckets have been all-reduced.
# - Before the second step, buckets are rebuilt in the order in which gradients arrived. Rank 0
#   broadcasts the new layout.
# - With `find_unused_parameters`, parameters that the graph does not reach count as arrived. A map
#   of the used parameters is all-reduced after the last bucket.
# - With a static graph, the first backward only counts how often each gradient arrives; all buckets
#   are all-reduced when it ends. Buckets are rebuilt one step later than otherwise.
# The method names are torch's, because DDP calls them.

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm.recording.owners.attribution import find_graph_nodes
from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.upstream import look_up

_USE: Final = "a simulation of DDP relies on"
_FIND_RANK: Final = "_find_common_rank"
_IS_LAST_BUCKET_SMALL: Final = "DDP_SET_LAST_BUCKET_CAP"
_engine: Final = look_up("torch.autograd", "Variable._execution_engine", _USE)
_assign: Final = look_up("torch.distributed", "_compute_bucket_assignment_by_size", _USE)
_Hook = Callable[[dist.GradBucket], "torch.futures.Future[Any]"]  # type: ignore[name-defined]  # public, but torch does not list it


def reducer_patches() -> Iterator[Replacement]:
    """Yield the arguments of `setattr` that make DDP use a `SimulatedReducer`."""
    look_up("torch.nn.parallel", f"DistributedDataParallel.{_FIND_RANK}", _USE)
    look_up("torch.distributed", "_verify_params_across_processes", _USE)
    yield dist, "Reducer", SimulatedReducer
    yield dist, "Logger", SimulatedLogger
    yield dist, "_register_comm_hook", _simulated_register_hook
    yield dist, "_register_builtin_comm_hook", _simulated_register_builtin_hook
    yield wrap_attribute(dist, "_verify_params_across_processes", _simulated_verify_params)
    yield wrap_attribute(DistributedDataParallel, _FIND_RANK, _simulated_find_common_rank)


class SimulatedBucket(dist.GradBucket):  # type: ignore[misc, name-defined]  # as above
    """A bucket of gradients, also as communication hooks receive it."""

    @classmethod
    def create(
        cls, indices: Sequence[int], parameters: Sequence[torch.Tensor], dtype: torch.dtype | None
    ) -> SimulatedBucket:
        """Create an empty bucket for parameters, given with their indices among all parameters."""
        bucket: SimulatedBucket = cls.__new__(cls)  # only torch's reducer can call `__init__`
        bucket.indices, bucket.params = indices, parameters
        bucket.num_missing = len(indices)  # how many gradients have not arrived in this step
        bucket.future = None  # the running all-reduce
        bucket.number, bucket.is_final = 0, False
        numel = sum(parameter.numel() for parameter in parameters)
        bucket.flat = parameters[0].new_empty(numel, dtype=dtype)
        bucket.views = bucket.split(bucket.flat)
        return bucket

    indices: Sequence[int]
    num_missing: int
    future: torch.futures.Future[Any] | None
    number: int
    is_final: bool
    views: list[torch.Tensor]
    params: Sequence[torch.Tensor]
    flat: torch.Tensor

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of a flat tensor that belongs to each parameter."""
        parts = torch.split(buffer, [parameter.numel() for parameter in self.params])
        pairs = zip(parts, self.params, strict=True)
        return [part.view(parameter.shape) for part, parameter in pairs]

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        return self.split(self.flat)

    def parameters(self) -> list[torch.Tensor]:
        return [*self.params]

    def is_last(self) -> bool:
        return self.is_final


class SimulatedReducer:
    """All-reduces the gradients of a DDP module, as torch's reducer does."""

    def __init__(  # noqa: PLR0913, PLR0917  # torch's signature
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],  # noqa: ARG002  # only for torch's log
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 * 2**20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: dict[int, str] | None = None,
        first_bucket_bytes_cap: int = 2**20,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,  # noqa: ARG002  # the others must stay in place
        bucket_bytes_cap_list: Sequence[int] = (),  # since torch 2.11
        batched_grad_copy: bool = False,  # noqa: ARG002  # how torch copies, not what it sends
        lazy_bucket_allocation: bool = False,  # noqa: ARG002  # since torch 2.15; saves memory
    ) -> None:
        self._params, self.group = params, process_group
        self._is_sparse = expect_sparse_gradients
        self._limits = bucket_bytes_cap_list or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._finds_unused = find_unused_parameters
        self._has_views = gradient_as_bucket_view
        self._names = param_to_name_mapping or {}
        self._skips_unused = skip_all_reduce_unused_params
        self._hook: _Hook | None = None
        self._dtype: torch.dtype | None = None
        self._is_static = self._has_optimizer = self._is_manual = False
        self._num_steps = 0
        self._is_rebuilt = False
        self._arrived: list[int] = []
        """Parameters in the order in which their gradients arrive, to rebuild the buckets."""
        self._num_arrivals: Counter[int] = Counter()
        """How often each gradient arrives in the first step of a static graph."""
        self._used: set[int] = set()
        self._unused: Sequence[int] = ()
        self._futures: list[torch.futures.Future[Any]] = []
        self._make_buckets(bucket_indices)
        self._reset_state()
        # Post hooks of autograd nodes run after the gradient has been accumulated. Keep the nodes,
        # because a parameter does not keep its node. Hooks must not keep this reducer alive.
        self._nodes = [get_gradient_edge(parameter).node for parameter in params]
        arrive = weakref.WeakMethod(self._autograd_hook)
        for index, node in enumerate(self._nodes):
            node.register_hook(functools.partial(_call_if_alive, arrive, index))

    def _make_buckets(self, layout: Sequence[Sequence[int]]) -> None:
        self._buckets = [
            SimulatedBucket.create(indices, [self._params[index] for index in indices], self._dtype)
            for indices in layout
        ]
        self._buckets[-1].is_final = True
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    @property
    def _should_rebuild_buckets(self) -> bool:
        return not self._is_rebuilt and (self._is_static or not self._finds_unused)

    @property
    def _is_searching_unused(self) -> bool:
        """Whether each forward searches for unused parameters."""
        return self._finds_unused and not self._is_static

    @property
    def _is_first_static_step(self) -> bool:
        return self._is_static and self._num_steps == 1

    def prepare_for_forward(self) -> None:
        self._num_steps += 1

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        self._reset_state()
        self._is_expecting = True
        if self._is_searching_unused:
            nodes = find_graph_nodes(outputs)
            self._unused = [index for index, node in enumerate(self._nodes) if node not in nodes]

    def _reset_state(self) -> None:
        self._is_expecting = self._is_unfinished = self._has_marked_unused = False
        self._num_launched = 0
        self._ready: set[int] = set()
        self._num_missing = self._num_arrivals.copy()
        for bucket in self._buckets:
            bucket.num_missing, bucket.future = len(bucket.indices), None

    def _autograd_hook(self, index: int) -> None:
        """Handle the gradient of a parameter, which backward has just accumulated."""
        has_gradient, is_first = self._params[index].grad is not None, self._is_first_static_step
        if has_gradient and (is_first or self._is_searching_unused):
            self._used.add(index)
        if is_first:
            self._num_arrivals[index] += 1
            return
        if not self._is_expecting:  # in no_sync()
            return
        if not self._has_marked_unused:
            self._has_marked_unused = True
            for unused in self._unused:
                self._mark_gradient_ready(unused)
        if self._is_static:
            if not self._num_missing[index]:
                raise RuntimeError(
                    "Your training graph has changed in this iteration, which is not compatible "
                    f"with static_graph=True: {self._name_of(index)} got a gradient more often "
                    "than in the first step"
                )
            self._num_missing[index] -= 1
            if self._num_missing[index]:
                return
        if self._should_rebuild_buckets:
            self._arrived.append(index)
        self._mark_gradient_ready(index)

    def _mark_gradient_ready(self, index: int) -> None:
        if index in self._ready:
            raise RuntimeError(
                f"Expected to mark a variable ready only once: {self._name_of(index)} got a second "
                "gradient in one step. Do not use a parameter outside of DDP's forward, or in "
                "several reentrant checkpoints; or set static_graph=True"
            )
        self._ready.add(index)
        self._is_unfinished = True
        self._bucket_of[index].num_missing -= 1
        for bucket in self._buckets[self._num_launched :]:
            if bucket.num_missing:
                return
            if not (self._skips_unused and {*bucket.indices} <= {*self._unused}):
                self._launch_bucket(bucket)
            self._num_launched += 1
        if self._is_searching_unused:
            self._reduce_used_parameter_map()
        if not self._is_manual:
            _engine.queue_callback(self._finish_backward)  # runs when backward ends

    def _delay_all_reduce(self) -> None:
        """Reduce all gradients at the end of backward, in the first step of a static graph."""
        self._reduce_used_parameter_map()
        self._unused = [
            index for index in range(len(self._params)) if not self._num_arrivals[index]
        ]
        for bucket in self._buckets:
            self._launch_bucket(bucket)
        self._is_expecting = self._is_unfinished = False
        self._wait_and_copy_gradients()

    def _launch_bucket(self, bucket: SimulatedBucket) -> None:
        bucket.number = self._num_launched
        with torch.no_grad():
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                parameter = self._params[index]
                if parameter.grad is None:
                    view.zero_()
                    continue
                if parameter.grad.layout is not torch.strided:
                    raise SimulationError(
                        f"{self._name_of(index)} has a sparse gradient, which simulated DDP cannot "
                        "reduce: use sparse=False, or run the test on real ranks, without simulate="
                    )
                view.copy_(parameter.grad)
                if self._has_views:
                    parameter.grad = view
        bucket.future = self._run_comm_hook(bucket)

    def _reduce_used_parameter_map(self) -> None:
        used = [int(index in self._used) for index in range(len(self._params))]
        with torch.no_grad():
            self.group.allreduce([self._params[0].new_tensor(used, dtype=torch.int32)])

    def _finish_backward(self) -> None:
        self._is_expecting = self._is_unfinished = False
        if self._is_static and self._should_rebuild_buckets:
            self._arrived += self._unused
        self._wait_and_copy_gradients()

    def _wait_and_copy_gradients(self) -> None:
        """Wait for the buckets, and copy them to the gradients."""
        for bucket in self._buckets:
            if bucket.future is not None:
                result = bucket.future.wait()
                buffer = result if isinstance(result, torch.Tensor) else result[0]
                if not self._has_optimizer:
                    self._copy_to_gradients(bucket, bucket.split(buffer))
        for future in self._futures:
            future.wait()
        self._futures.clear()
        if self._is_searching_unused:
            self._used.clear()

    @torch.no_grad()
    def _copy_to_gradients(self, bucket: SimulatedBucket, results: Sequence[torch.Tensor]) -> None:
        for index, view, result in zip(bucket.indices, bucket.views, results, strict=True):
            parameter = self._params[index]
            # If no rank has used a parameter, torch leaves its gradient as it is. Other ranks
            # are assumed to use the same parameters as this one.
            if (self._finds_unused or self._is_static) and index not in self._used:
                continue
            if parameter.grad is None:
                parameter.grad = view if self._has_views else torch.empty_like(parameter)
            parameter.grad.copy_(result)

    def _rebuild_buckets(self) -> bool:
        self._check_reducer_finalized()
        if not (self._should_rebuild_buckets and self._arrived):
            return False
        step = -1 if os.environ.get(_IS_LAST_BUCKET_SMALL) == "1" else 1
        arrived = self._arrived[::step]
        params = [self._params[index] for index in arrived]
        layout, _ = _assign(params, self._limits, self._is_sparse, arrived)
        # torch sends the indices of all buckets and the number of buckets, then their sizes.
        for numel in (len(arrived) + 1, len(layout)):
            self.group.broadcast([params[0].new_empty(numel, dtype=torch.int32)]).wait()
        self._is_rebuilt = True
        self._arrived = []
        self._make_buckets(layout[::step])
        return True

    def _check_reducer_finalized(self) -> None:
        if not self._is_unfinished:
            return
        missing = [index for index in range(len(self._params)) if index not in self._ready]
        remedy = (
            "make sure that all outputs of forward contribute to the loss"
            if self._finds_unused
            else "pass find_unused_parameters=True"
        )
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            f"{', '.join(map(self._name_of, missing))} got no gradient; {remedy}"
        )

    def _name_of(self, index: int) -> str:
        return self._names.get(index, f"parameter {index}").removeprefix(".")

    def set_hook(self, hook: _Hook) -> None:
        """Set the communication hook, which may only be set once."""
        if self._hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._hook = hook

    def _run_comm_hook(self, bucket: SimulatedBucket) -> torch.futures.Future[object]:
        return (self._hook or self._run_allreduce_hook)(bucket)

    def _run_allreduce_hook(self, bucket: SimulatedBucket) -> torch.futures.Future[object]:
        return _all_reduce_bucket(self.group, None, bucket)

    def _set_static_graph(self) -> None:
        self._is_static = True

    def _set_optimizer_in_backward(self) -> None:
        self._has_optimizer = True

    def _set_manual_finalization_required(self, required: bool) -> None:
        self._is_manual = required

    def _should_finalize_after_backward(self) -> bool:
        return self._should_rebuild_buckets

    def _finalize_backward_manual(self) -> None:
        is_launched = self._is_expecting and self._num_launched == len(self._buckets)
        if not (self._is_manual and is_launched):
            raise RuntimeError("finalize_backward() has no all-reduces to wait for")
        self._finish_backward()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._make_buckets([bucket.indices for bucket in self._buckets])

    def _install_post_backward_futures(
        self, futures: Sequence[torch.futures.Future[object]]
    ) -> None:
        self._futures += futures

    def _ignore(self, *_: object) -> None:
        """Do nothing, because the call does not change what is sent."""

    set_logger = _set_sparse_metadata = _set_forward_pass_work_handle = _ignore
    _set_ddp_runtime_logging_sample_rate = _ignore


class SimulatedLogger:
    """Replaces the logger that DDP creates beside its reducer; it logs nothing."""

    def __init__(self, _: SimulatedReducer) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})


def _call_if_alive(method: weakref.WeakMethod[Any], index: int, *_: object) -> None:
    if (arrive := method()) is not None:
        arrive(index)


def _simulated_register_hook(
    reducer: SimulatedReducer, state: object, hook: Callable[..., Any]
) -> None:
    reducer.set_hook(functools.partial(hook, state))


def _simulated_register_builtin_hook(reducer: SimulatedReducer, kind: Any) -> None:
    dtype = torch.float16 if kind.name == "FP16_COMPRESS" else None
    reducer.set_hook(functools.partial(_all_reduce_bucket, reducer.group, dtype))


def _all_reduce_bucket(
    group: dist.ProcessGroup, dtype: torch.dtype | None, bucket: SimulatedBucket
) -> torch.futures.Future[object]:
    with torch.no_grad():
        sent = bucket.buffer().to(dtype or bucket.buffer().dtype)
    return group.allreduce([sent]).get_future()


def _simulated_verify_params(
    verify: Callable[..., None],
    group: dist.ProcessGroup,
    parameters: Sequence[torch.Tensor],
    *_: object,
) -> None:
    """Make DDP compare the shapes of all ranks' parameters with tensors that torch can read."""
    with unset_fake_temporarily():
        zeros = [torch.zeros((), dtype=param.dtype, device="cpu") for param in parameters]
        verify(group, [*map(torch.Tensor.expand, zeros, (param.shape for param in parameters))])


def _simulated_find_common_rank(
    find: Callable[..., int], ddp: DistributedDataParallel, _: int, is_candidate: bool
) -> int:
    """Make DDP choose the last rank, as it does under ``Join`` if all ranks have equal inputs."""
    last = int(ddp.process_group.size()) - 1
    try:
        return find(ddp, last, is_candidate)
    except SimulationError:
        # torch before 2.11 does not tell that its all-reduce computes the maximum.
        return last
