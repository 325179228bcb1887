"""Watches FSDP's own units while a recording runs: who owns a collective, and what is resharded.

torch's profiler labels carry the owner too, but their FQNs are relative to the FSDP root, empty
with several roots or none, and absent before lazy initialisation. So the methods that issue
collectives are wrapped, for the time of the recording only. Their names and arguments were read in
torch 2.6, 2.9, 2.11 and 2.13; tests/recording/test_contracts.py fails when one moves.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from pytest_fsdp_comm import upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

ReshardAction = Literal["unshard", "reshard"]

_FSDP1_FLAT_PARAM = "torch.distributed.fsdp._flat_param"
_FSDP1_RUNTIME = "torch.distributed.fsdp._runtime_utils"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ActingUnit:
    """A unit one of whose methods runs."""

    modules: tuple[nn.Module, ...]
    serves: bool
    """Whether its collectives serve its own parameters; False while it only triggers a prefetch of
    others."""
    is_in_backward: bool
    """Whether the method belongs to backward. A pipeline schedule calls it outside of autograd."""


class UnitWatch:
    """Watches which FSDP units act at each moment."""

    def __init__(
        self,
        on_reshard: Callable[
            [Literal["unshard", "reshard"], tuple[nn.Module, ...], int, float], None
        ],
        on_mesh: Callable[[DeviceMesh], None],
        on_post_forward: Callable[[ProcessGroup, ProcessGroup], None],
    ) -> None:
        """Prepares; wraps nothing.

        Args:
            on_reshard: Called each time a unit's state changes, with ``unshard`` or ``reshard``,
                its modules, its bytes and the host seconds that a reshard took (0.0 for an unshard,
                whose all-gather is timed itself).
            on_mesh: Called with each mesh that a unit uses.
            on_post_forward: Called with the group over which a unit is sharded between forward and
                backward where it is a smaller one, and the one over which it is sharded otherwise.
        """
        self._acting: list[_ActingUnit] = []
        self._on_reshard = on_reshard
        self._on_mesh = on_mesh
        self._on_post_forward = on_post_forward

    @property
    def owner(self) -> tuple[nn.Module, ...]:
        """The modules of the unit whose parameters are being sent; empty if none is."""
        for unit in reversed(self._acting):
            if unit.serves:
                return unit.modules
        return ()

    @property
    def issuer(self) -> tuple[nn.Module, ...]:
        """The modules of the unit whose hook runs, which under prefetch is not the owner."""
        return self._acting[0].modules if self._acting else ()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward hook of a unit runs."""
        return any(unit.is_in_backward for unit in self._acting)

    def learn_groups(self, group: Any) -> None:
        """Reports the mesh of a parameter group, and that of ``reshard_after_forward``."""
        self._on_mesh(group.mesh_info.mesh)
        after = group.post_forward_mesh_info
        if after is not None:
            self._on_post_forward(after.shard_process_group, group.mesh_info.shard_process_group)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps FSDP's methods and puts them back."""
        with contextlib.ExitStack() as undo:
            for holder, name, wrap in [*self._fsdp2(), *self._fsdp1()]:
                original = holder.__dict__.get(name)
                if original is None:
                    raise upstream.moved(
                        "torch",
                        f"{_qualified(holder)}.{name}",
                        "the recorder relies on to find the owner of a collective",
                    )
                setattr(holder, name, functools.wraps(original)(wrap(original)))
                undo.callback(setattr, holder, name, original)
            yield

    def _fsdp2(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import (  # noqa: PLC0415  # loads torch.distributed
            FSDPParamGroup,
        )
        from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415  # see above
            FSDPState,
        )

        return [
            # Around the group's own: explicit prefetch is issued after that has returned.
            (FSDPState, "_pre_backward", self._wrap_state),
            (FSDPParamGroup, "unshard", self._wrap_unshard),
            (FSDPParamGroup, "reshard", self._wrap_reshard),
            (FSDPParamGroup, "pre_backward", functools.partial(self._wrap_backward, serves=False)),
            (FSDPParamGroup, "post_backward", functools.partial(self._wrap_backward, serves=True)),
        ]

    def _fsdp1(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        if _FSDP1_FLAT_PARAM not in sys.modules:
            return []
        handle = sys.modules[_FSDP1_FLAT_PARAM].FlatParamHandle
        runtime: Any = sys.modules.get(_FSDP1_RUNTIME)
        wraps: list[tuple[Any, str, Callable[..., Any]]] = [
            (handle, "_all_gather_flat_param", self._wrap_gather_of_handle),
            (handle, "unshard_grad", self._wrap_handle_first),
            (handle, "reshard", self._wrap_reshard_of_handle),
        ]
        if runtime is not None:
            wraps += [
                (runtime, "_reduce_grad", self._wrap_handle_second),
                (runtime, "_reduce_grad_no_shard", self._wrap_handle_second),
                (runtime, "_prefetch_handle", self._wrap_prefetch_of_handle),
            ]
        return wraps

    def _wrap_state(self, original: Any) -> Any:
        def wrapped(state: Any, *args: Any, **kwargs: Any) -> Any:
            with self._act(tuple(state._modules), serves=False, is_in_backward=True):
                return original(state, *args, **kwargs)

        return wrapped

    def _wrap_backward(self, original: Any, *, serves: bool) -> Any:
        def wrapped(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._on_mesh(group.mesh_info.mesh)
            with self._act(tuple(group.modules), serves=serves, is_in_backward=True):
                return original(group, *args, **kwargs)

        return wrapped

    def _wrap_unshard(self, original: Any) -> Any:
        def wrapped(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.learn_groups(group)
            pending = group._all_gather_result
            with self._act(tuple(group.modules), serves=True):
                result = original(group, *args, **kwargs)
                # Set by a gather that was really issued, and only then.
                if pending is None and group._all_gather_result is not None:
                    nbytes = _unsharded_nbytes(group)
                    self._on_reshard("unshard", tuple(group.modules), nbytes, 0.0)
            return result

        return wrapped

    def _wrap_reshard(self, original: Any) -> Any:
        def wrapped(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = group._sharded_state
            with self._act(tuple(group.modules), serves=True):
                started = time.perf_counter()
                result = original(group, *args, **kwargs)
                seconds = time.perf_counter() - started
                if group._sharded_state != before:
                    nbytes = _unsharded_nbytes(group)
                    self._on_reshard("reshard", tuple(group.modules), nbytes, seconds)
            return result

        return wrapped

    def _wrap_gather_of_handle(self, original: Any) -> Any:
        def wrapped(handle: Any, unsharded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            modules = _modules_of_handle(handle)
            with self._act(modules, serves=True):
                result = original(handle, unsharded, *args, **kwargs)
                nbytes = unsharded.numel() * unsharded.element_size()
                self._on_reshard("unshard", modules, nbytes, 0.0)
            return result

        return wrapped

    def _wrap_reshard_of_handle(self, original: Any) -> Any:
        def wrapped(handle: Any, free: bool, *args: Any, **kwargs: Any) -> Any:
            modules = _modules_of_handle(handle)
            with self._act(modules, serves=True):
                frees = free and handle.uses_sharded_strategy and not handle.needs_unshard()
                started = time.perf_counter()
                result = original(handle, free, *args, **kwargs)
                seconds = time.perf_counter() - started
                if frees:
                    padded = handle.flat_param._full_param_padded
                    nbytes = padded.numel() * padded.element_size()
                    self._on_reshard("reshard", modules, nbytes, seconds)
            return result

        return wrapped

    def _wrap_handle_first(self, original: Any) -> Any:
        def wrapped(handle: Any, *args: Any, **kwargs: Any) -> Any:
            with self._act(_modules_of_handle(handle), serves=True):
                return original(handle, *args, **kwargs)

        return wrapped

    def _wrap_handle_second(self, original: Any) -> Any:
        def wrapped(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            with self._act(_modules_of_handle(handle), serves=True):
                return original(state, handle, *args, **kwargs)

        return wrapped

    def _wrap_prefetch_of_handle(self, original: Any) -> Any:
        def wrapped(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            modules = () if handle is None else _modules_of_handle(handle)
            with self._act(modules, serves=False):
                return original(state, handle, *args, **kwargs)

        return wrapped

    @contextlib.contextmanager
    def _act(
        self, modules: tuple[nn.Module, ...], *, serves: bool, is_in_backward: bool = False
    ) -> Iterator[None]:
        self._acting.append(
            _ActingUnit(modules=modules, serves=serves, is_in_backward=is_in_backward)
        )
        try:
            yield
        finally:
            self._acting.pop()


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of one module; none if it is no unit of its own.

    ``_fsdp_param_groups`` is new in torch 2.13; to 2.11 a state had one group.
    """
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def fsdp_root(module: nn.Module) -> nn.Module | None:
    """The root above a unit of FSDP2; None if it is no unit, or none of its model has run yet.

    Raises:
        UpstreamChangedError: torch has moved a name.
    """
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return None
    try:
        for state in get_state()._state_ctx.all_states:
            if state._is_root:
                found: nn.Module = state._modules[0]
                return found
    except AttributeError as problem:
        raise upstream.misread("torch", "FSDPState", problem) from problem
    return None


def _unsharded_nbytes(group: Any) -> int:
    total = 0
    for param in group.fsdp_params:
        dtype = param.param_dtype or param.orig_dtype
        total += param._orig_size.numel() * dtype.itemsize
    return total


def _modules_of_handle(handle: Any) -> tuple[nn.Module, ...]:
    return (handle._fully_sharded_module,)


def _qualified(holder: Any) -> str:
    return f"{getattr(holder, '__module__', '')}.{holder.__name__}".lstrip(".")
