"""Patches how FSDP2 and DTensor split tensors while a rank is simulated."""

# FSDP2 splits each parameter into chunks for all ranks, but uses only one chunk, so `LazyChunks`
# creates a chunk only when it is accessed. Checked in torch 2.7 to 2.15.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import _meta_registrations
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _random, _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.simulation.process_groups import wrap_with_memory

_CHUNKS = "_chunk_with_empty"
_LEARN = "_propagate_tensor_meta_non_cached"  # checked in torch 2.13
_STRIDED = "_propagate_use_strided_shard_flag"  # checked in torch 2.13 and 2.15
_TRACKER = "_rng_tracker"  # checked in torch 2.13
_GROUPED = "_meta_grouped_mm_common"  # checked in torch 2.13 and 2.15


def sharding_patches() -> Iterator[Replacement]:
    """Yield replacements for functions with which FSDP2 and DTensor split tensors."""
    if hasattr(_fsdp_param, _CHUNKS):  # without it, simulations are just slower
        yield _fsdp_param, _CHUNKS, LazyChunks
    # DTensor runs operations on full-size fake tensors to find the shapes of results. Run them
    # outside the simulation, so that the fake tensors do not count as memory of this rank.
    learn = getattr(ShardingPropagator, _LEARN, None)
    if learn is not None:  # without it, memory estimates are just too large
        yield ShardingPropagator, _LEARN, wrap_with_memory(learn)
    if hasattr(_sharding_prop, _STRIDED):  # without it, simulations are just slower
        search = _wrap_strided_shard_search(getattr(_sharding_prop, _STRIDED))
        yield _sharding_prop, _STRIDED, search
    # DTensor's rand and randn require a tracker of GPU generators, and use nothing else of it.
    if hasattr(_random, _TRACKER):
        tracker = SimpleNamespace(
            distribute_region_enabled=False,
            _distribute_region=lambda *_, **__: contextlib.nullcontext(),
        )
        yield _random, _TRACKER, tracker
        yield _random, "is_rng_supported_mesh", lambda _: True  # the original warns about the CPU
    if hasattr(_meta_registrations, _GROUPED):
        yield wrap_attribute(_meta_registrations, _GROUPED, _simulated_grouped_mm_meta)


def _wrap_strided_shard_search(propagate: Callable[..., None]) -> Callable[..., None]:
    """Make torch look for strided shards once per operation, not for each sharding strategy."""
    schema: Any = None
    is_needed = False

    def run(strategy: object, op_schema: Any) -> None:
        nonlocal schema, is_needed
        if schema is not op_schema:
            placements = (entry for spec in op_schema.args_spec for entry in spec.placements)
            schema = op_schema
            is_needed = any(isinstance(entry, _StridedShard) for entry in placements)
        if is_needed:
            propagate(strategy, op_schema)

    return run


def _simulated_grouped_mm_meta(
    infer: Callable[..., object], *args: Any, scale_a: object = None, **options: object
) -> object:
    # Like a GPU, torch's meta kernel for grouped matrix products accepts only bfloat16. The CPU
    # also accepts other dtypes, so compute the result's shape for these here.
    if scale_a is None and args[0].dtype != torch.bfloat16:
        make: Any = _meta_registrations._create_grouped_mm_output_tensor
        return make(*args[:2], options.get("offs"), options.get("out_dtype"))
    return infer(*args, scale_a=scale_a, **options)


class LazyChunks(Sequence[torch.Tensor]):
    """Replaces FSDP2's ``_chunk_with_empty``, but creates a chunk only when it is accessed."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        number = range(self._num)[index]
        start, size = number * self._length, self._tensor.size(self._dim)
        if size and start >= size:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, size - start))
