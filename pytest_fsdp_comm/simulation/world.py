"""What of torch works otherwise where one rank is simulated."""

# Note [What stays real]
# A mesh is arithmetic on the numbers of ranks, which torch does with tensors: they stay real, as it
# reads them. FSDP2 cuts each parameter into the chunks of all ranks, to keep one: they are cut when
# they are looked at. Read in torch 2.7 to 2.15.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._pytree import tree_map_only

from pytest_fsdp_comm.recording.active import patched
from pytest_fsdp_comm.recording.value_dependence import told_of_values
from pytest_fsdp_comm.simulation.values import SimulatedTensors, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNKS = "_chunk_with_empty"


@contextlib.contextmanager
def simulated(*, answers: bool) -> Iterator[None]:
    """Simulate this rank while the block runs.

    Args:
        answers: Whether a floating-point number that nobody knows is 1.0, and a truth False;
            otherwise each is an error, as unknown whole numbers always are.
    """
    with contextlib.ExitStack() as undo:
        mesh = device_mesh.DeviceMesh
        for name, found in [*vars(mesh).items()]:
            if name.startswith("__") and name not in {"__init__", "__getitem__"}:
                continue
            real = _real(found)
            if real is not None:
                undo.enter_context(patched(mesh, name, real))
        if hasattr(_fsdp_param, _CHUNKS):  # otherwise only slower
            undo.enter_context(patched(_fsdp_param, _CHUNKS, LazyChunks))
        undo.enter_context(told_of_values())
        undo.enter_context(_tensors(answers))
        yield


@functools.cache
def _tensors(answers: bool) -> SimulatedTensors:
    # One for the process: fixtures of a module outlive the test that they were made in, and torch
    # mixes no tensors of two.
    return SimulatedTensors(answers=answers)


def _real(found: Any) -> Any:
    """A method or property of a mesh as one on real tensors; None for anything else."""
    if isinstance(found, property) and found.fget is not None:
        return property(_on_real(found.fget), found.fset, found.fdel)
    if isinstance(found, staticmethod):
        return staticmethod(_on_real(found.__func__))
    return _on_real(found) if callable(found) and not isinstance(found, type) else None


def _on_real(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, values_of, (args, kwargs))
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


class LazyChunks(Sequence[torch.Tensor]):
    """As ``_chunk_with_empty`` of FSDP2: the chunks of a tensor, each made when it is looked at."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        """Cut into `num_chunks` along `dim`, of which the last ones may be shorter, or empty."""
        self._tensor, self._num, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        """As many as asked for."""
        return self._num

    def __getitem__(self, index: Any) -> Any:
        """One chunk."""
        number = range(self._num)[index]
        start, whole = number * self._length, self._tensor.size(self._dim)
        if whole and start >= whole:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, whole - start))
