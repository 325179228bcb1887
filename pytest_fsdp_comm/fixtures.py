"""The plugin's fixtures, which are set up separately on each rank."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT, RankContext
from pytest_fsdp_comm.text.words import show_count

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251  # for the type only

    from pytest_fsdp_comm.fsdp_tree import TreeFactory
    from pytest_fsdp_comm.recording.comm_mode import CommMode
    from pytest_fsdp_comm.snapshots.extension import CommSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class DistInfo:
    """Value of the fixture ``dist_info``: rank, world size, backend and device of a test."""

    rank: int
    local_rank: int
    """Index of this rank on its machine, starting at 0."""
    world_size: int
    """Size of the default process group; 1 in a test that is not distributed."""
    backend: str
    """``gloo``, ``nccl``, or ``fake`` for a simulated rank; empty if the test is not
    distributed."""
    device: str
    """Device for this rank's tensors: ``cpu`` or ``cuda:N``."""


class MakeDeviceMesh:
    """Value of the ``device_mesh`` fixture: makes device meshes that span all ranks."""

    def __init__(self, dist_info: DistInfo) -> None:
        self._dist_info = dist_info

    def __call__(self, **axes: int) -> DeviceMesh:
        """Make a mesh of all ranks with named axes, e.g. ``device_mesh(dp=2, tp=2)``.

        Args:
            axes: Size of each axis, outermost first. One size may be -1; it is then computed from
                the world size. Without axes, the mesh has one axis ``dp``.

        Raises:
            FsdpCommError: The product of the sizes is not the world size.
        """
        __tracebackhide__ = True  # show the caller's line
        from pytest_fsdp_comm.ranks.rank.process_group import has_group, make_mesh  # noqa: PLC0415  # loads torch

        # Allow a test without the marker if it has a process group or runs under a launcher.
        if not (self._dist_info.backend or has_group() or "RANK" in os.environ):
            test = os.environ.get("PYTEST_CURRENT_TEST", "this test").partition(" (")[0]
            size = math.prod(axes.values()) if min(axes.values(), default=0) > 0 else 2
            raise FsdpCommError(
                f"device_mesh needs ranks, but {test} is not marked as distributed and "
                "runs in pytest's own process. Mark it, its class or its module: "
                f"@pytest.mark.distributed(world_size={size})"
            )
        sizes = mesh_sizes(axes or {"dp": -1}, self._dist_info.world_size)
        mesh: DeviceMesh = make_mesh(self._dist_info.device.partition(":")[0], sizes)
        return mesh

    def __repr__(self) -> str:
        """Return a short repr, because pytest prints it when a test with this fixture fails."""
        return f"<MakeDeviceMesh of {show_count(self._dist_info.world_size, 'rank')}>"


@pytest.fixture
def _fsdp_comm_world_size(request: pytest.FixtureRequest) -> Any:
    return request.param


# Use session scope, so that fixtures of any scope and Hypothesis tests can request this fixture.
# Its value does not change within a rank.
@pytest.fixture(scope="session")
def dist_info(request: pytest.FixtureRequest) -> DistInfo:
    """Rank, local_rank, world_size, backend and device of the running test."""
    context = _get_rank_context(request)
    if context is None:
        return DistInfo(rank=0, local_rank=0, world_size=1, backend="", device="cpu")
    return DistInfo(
        rank=context.rank,
        local_rank=context.local_rank,
        world_size=context.settings.world_size,
        backend=context.settings.backend,
        device=context.device,
    )


@pytest.fixture(scope="session")
def device_mesh(dist_info: DistInfo) -> MakeDeviceMesh:
    """Make device meshes of all ranks, e.g. ``device_mesh(dp=2, tp=-1)``."""
    return MakeDeviceMesh(dist_info)


def mesh_sizes(axes: dict[str, int], world_size: int) -> dict[str, int]:
    """Replace a size of -1 with the computed size; raise FsdpCommError if the sizes do not fit."""
    __tracebackhide__ = True
    product = math.prod(size for size in axes.values() if size != -1)
    open_axes = [name for name, size in axes.items() if size == -1]
    sizes = {
        name: world_size // product if size == -1 and product > 0 else size
        for name, size in axes.items()
    }
    if len(open_axes) > 1 or math.prod(sizes.values()) != world_size or min(sizes.values()) < 1:
        arguments = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise FsdpCommError(
            f"device_mesh({arguments}) does not fit world size {world_size}: the product of "
            "the sizes must equal it, and at most one may be -1"
        )
    return sizes


@pytest.fixture
def comm_mode(request: pytest.FixtureRequest) -> CommMode:
    """Record every collective of a block: ``with comm_mode(model):``, or ``with comm_mode:``.

    After the block, compare the recording with ``assert comm_mode == comm_snapshot``, or query it,
    as in ``comm_mode.counts("all_gather", phase="backward")`` or ``comm_mode.nbytes(axis="tp")``.
    """  # noqa: D402  # shows how to use it, not its signature
    from pytest_fsdp_comm.recording.comm_mode import CommMode  # noqa: PLC0415  # loads torch
    from pytest_fsdp_comm.snapshots.comm_text import format_profile  # noqa: PLC0415  # as above

    return CommMode(
        show=format_profile, trace_operations=False, **_make_exchange_arguments(request)
    )


@pytest.fixture
def fsdp_tree(request: pytest.FixtureRequest) -> TreeFactory:
    """Show how a model is sharded: ``print(fsdp_tree(model))``.

    ``assert not fsdp_tree(model).findings`` guards against wrapping mistakes, and
    ``assert fsdp_tree(model) == comm_snapshot(name="tree")`` against every change.
    """
    from pytest_fsdp_comm.fsdp_tree import TreeFactory  # noqa: PLC0415  # loads torch

    return TreeFactory(
        findings=request.config.stash[OPTIONS].findings, **_make_exchange_arguments(request)
    )


@pytest.fixture
def comm_snapshot(request: pytest.FixtureRequest, snapshot: SnapshotAssertion) -> CommSnapshot:
    """Compare with this test's reviewed snapshots, which ``pytest --snapshot-update`` writes.

    ``assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot`` compares both;
    ``comm_snapshot(name="second")`` uses a different file for the next comparison.
    """
    from pytest_fsdp_comm.snapshots.extension import bind_snapshot  # noqa: PLC0415  # on first use only

    context = _get_rank_context(request)
    if context is None:
        return bind_snapshot(snapshot, request.node, None)
    explains = context.rank == context.settings.ranks[0]
    return bind_snapshot(snapshot, request.node, context.exchange, explains=explains)


def _get_rank_context(request: pytest.FixtureRequest) -> RankContext | None:
    return request.config.stash.get(RANK_CONTEXT, None)


def _make_exchange_arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return keyword arguments that let ranks exchange values; empty if this is not a rank."""
    context = _get_rank_context(request)
    return {} if context is None else {"gather": context.exchange, "ranks": context.settings.ranks}
