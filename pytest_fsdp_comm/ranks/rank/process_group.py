"""Creates the process group of a rank, and adds remedies to torch's errors about it."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.gathering import TextStore
from pytest_fsdp_comm.launch_environment import LaunchedRank, simulated_variables
from pytest_fsdp_comm.options import SETTINGS, DistributedSettings, ranks_along
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT, RankContext
from pytest_fsdp_comm.ranks.rank.gpus import visible_gpus_variable
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_fsdp_comm.simulation.groups import RealGroups


# Process groups time out this much later than the test, so that a hang ends with the supervisor's
# report on all ranks, not with a timeout error on one rank.
_BEYOND_DEADLINE_S = 3600.0


def device_of(settings: DistributedSettings, local_rank: int) -> str:
    """Return the device for a rank's tensors; `local_rank` is the rank's number on its machine."""
    wants_cuda = settings.device == "cuda" or (
        settings.backend == "nccl" and settings.device is None
    )
    has_gpu = settings.backend != "fake" or settings.simulation
    return f"cuda:{local_rank}" if wants_cuda and has_gpu else "cpu"


def count_gpus_of_ranks(settings: DistributedSettings) -> int:
    """Return how many GPUs the ranks of a test use in total."""
    if settings.simulation:
        return 0
    return sum(device_of(settings, rank).startswith("cuda") for rank in settings.ranks)


def set_environment(spec: RankSetSpec, rank: int, launched: LaunchedRank | None) -> None:
    """Set torchrun's variables and torch's thread count; hide the GPUs of other rank sets."""
    settings = spec.settings
    if spec.gpus:
        os.environ[visible_gpus_variable(os.environ)] = ",".join(spec.gpus)
    local_size = launched.local_world_size if launched else settings.world_size
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(launched.local_rank if launched else rank)
    os.environ["WORLD_SIZE"] = str(settings.world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    if settings.simulation:
        os.environ |= simulated_variables(rank, settings.world_size)
    # By default, torch uses one thread per core in each process, so ranks would compete for the
    # cores. Also, OpenMP's threads do not survive a fork; see `spawn`.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Launchers other than torchrun may not say how many ranks run on this machine.
    is_sure = launched is None or launched.launcher == "torchrun"
    if sys.platform == "linux" and is_sure and local_size == settings.world_size:
        # By default, gloo looks up the hostname, which is slow or fails on many laptops.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch  # noqa: PLC0415  # not in the pytest process

    torch.set_num_threads(1)


def open_store(spec: RankSetSpec, launched: LaunchedRank | None) -> object:
    """Connect to the store of a rank set; each wait for a key outlasts the test's deadline."""
    from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]  # noqa: PLC0415  # documented; not in the pytest process

    timeout_s = spec.settings.timeout_s + _BEYOND_DEADLINE_S
    if launched:
        return PrefixStore(spec.store_prefix, connect_store(launched, timeout_s=timeout_s))
    store = FileStore(str(spec.directory / "store"), -1)
    store.set_timeout(dt.timedelta(seconds=timeout_s))
    return store


def connect_store(launched: LaunchedRank, *, timeout_s: float, serves: bool = False) -> Any:
    """Connect to the launcher's store, or start it if `serves`; raise DistError on failure."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  # as above

    store = TCPStore(
        launched.host,
        launched.port,
        is_master=serves,
        timeout=dt.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"pytest-fsdp-comm/{launched.run_id}", store)


def leave_group() -> None:
    """Destroy the default process group, if any, to close the connections to peers."""
    if has_group():
        import torch.distributed as dist  # noqa: PLC0415  # loaded

        with contextlib.suppress(Exception):  # the group may be broken
            dist.destroy_process_group()
        gc.collect()  # gloo closes its connections once nothing refers to the group


def has_group() -> bool:
    """Return whether this process has a default process group."""
    dist: Any = sys.modules.get("torch.distributed")
    # In a torch built without distributed support, the package exists, but lacks is_initialized.
    return dist is not None and dist.is_available() and dist.is_initialized()


def join_group(context: RankContext) -> object:
    """Create the default process group of this rank, and return it."""
    __tracebackhide__ = methodcaller("errisinstance", FsdpCommError)
    import torch  # noqa: PLC0415  # not in the pytest process
    import torch.distributed as dist  # noqa: PLC0415  # not in the pytest process

    if has_group():
        raise FsdpCommError(
            "a conftest.py, a test module or a plugin created a process group at import, but "
            "each rank creates one itself. Remove that init_process_group(), or move it into a "
            "fixture that only tests without ranks use"
        )
    settings = context.settings
    # Check this here, not when reading the marker: a skip mark may exclude machines without GPUs.
    if settings.device == "cuda" and settings.backend == "fake" and not settings.simulation:
        raise FsdpCommError(
            "device='cuda' does not work with the session's backend, fake, which runs on the CPU: "
            "drop device='cuda', or pass a backend to the marker"
        )
    if context.device.startswith("cuda") and not settings.simulation:
        count = torch.cuda.device_count()
        if count < context.local_world_size:
            remedy = "drop device='cuda'" if settings.device == "cuda" else "backend='gloo'"
            raise FsdpCommError(
                f"{context.local_world_size} ranks need one GPU each (visible: {count}); "
                f"use fewer ranks, {remedy}, or skip the "
                "test with pytest.mark.skipif(torch.cuda.device_count() < N, reason=...)"
            )
        torch.cuda.set_device(context.local_rank)
    if settings.backend == "fake":
        join_fake_group(context.rank, settings.world_size)
        return dist.group.WORLD
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings.backend == "nccl" else "gloo",
        store=dist.PrefixStore("group", context.store),  # type: ignore[attr-defined]  # as FileStore
        rank=context.rank,
        world_size=settings.world_size,
        timeout=dt.timedelta(seconds=settings.timeout_s + _BEYOND_DEADLINE_S),
    )
    # Wait for all ranks, because ranks that are still connecting fail if a peer exits early.
    context.exchange.share("joined")
    return dist.group.WORLD


def connect_real_groups(context: RankContext) -> RealGroups | None:
    """Connect a simulated rank to its peers on the marker's `real` axes; None without such axes."""
    real = context.settings.real
    if not real:
        return None
    import torch.distributed as dist  # noqa: PLC0415  # not in the pytest process

    from pytest_fsdp_comm.simulation.groups import RealGroups  # noqa: PLC0415  # as above

    # Like a process group, this store has a long timeout, so that the supervisor reports a hang.
    store = dist.PrefixStore("simulation", context.store)  # type: ignore[attr-defined]  # as FileStore
    axes = {axis.name: (axis.size, axis.stride) for axis in real}
    return RealGroups(axes, ranks_along(real, [context.rank]), TextStore(store))


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Create a device mesh of all ranks; `sizes` maps axis names to sizes, outermost first."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # see above

    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def skip_rendezvous(rank: int, world_size: int) -> Iterator[None]:
    """Make ``init_process_group`` return at once, without waiting for other ranks.

    `rank` and `world_size` apply unless the caller passes its own.
    """
    import torch.distributed as dist  # noqa: PLC0415  # not in the pytest process
    from torch.distributed import distributed_c10d  # noqa: PLC0415  # not in the pytest process

    from pytest_fsdp_comm.recording.patches import patch_attributes  # noqa: PLC0415  # loads torch

    make_store = _import_fake_store_class()

    def rendezvous(_: str, own: int = -1, size: int = -1, **__: object) -> Iterator[Any]:
        yield make_store(), own if own >= 0 else rank, size if size > 0 else world_size

    init = dist.init_process_group

    @functools.wraps(init)
    def init_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # A CPU build of torch rejects `device_id`, which also selects the default backend.
        device = kwargs.pop("device_id", None)
        init(backend or ("nccl" if device is not None else None), *args, **kwargs)

    inits = [(module, "init_process_group", init_group) for module in (dist, distributed_c10d)]
    with patch_attributes((distributed_c10d, "rendezvous", rendezvous), *inits):
        yield


def join_fake_group(rank: int, world_size: int) -> None:
    """Create a process group with torch's fake backend, which transfers no data."""
    import torch.distributed as dist  # noqa: PLC0415  # not in the pytest process

    make_store = _import_fake_store_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=make_store(), rank=rank, world_size=world_size)


def _import_fake_store_class() -> Any:
    # Importing this private module registers the "fake" backend, torch's only backend that works
    # with a single process (checked in 2.9, 2.11, 2.13, 2.15).
    name = "torch.testing._internal.distributed.fake_pg"
    try:
        return importlib.import_module(name).FakeStore
    except (ImportError, AttributeError):
        raise upstream.moved_error(
            "torch",
            f"{name}.FakeStore",
            "the fake backend relies on",
            remedy="upgrade pytest-fsdp-comm, or run this test with backend='gloo'",
        ) from None


# Parts of torch's error messages (checked in 2.13 and 2.15).
_TWICE = "initialize the default process group twice"
_NONE = "Default process group has not been initialized"
_NO_VARIABLE = re.compile(
    "environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
)

_UNMARKED = """\
fsdp-comm: this test is not marked as distributed, so it ran in the pytest process, without ranks
and without a process group. Mark it, its class or its module:
    @pytest.mark.distributed(world_size=2)"""
_MARKED = """\
fsdp-comm: the ranks of a distributed test get a process group before the first fixture runs, and it
lasts until the test ends. Remove the calls to init_process_group() and destroy_process_group()."""


def add_remedy(error: BaseException, item: pytest.Item) -> None:
    """Add a remedy to an error that torch raised about the default process group."""
    if not isinstance(error, ValueError):
        return
    text = str(error)
    lacks_group = _NONE in text or _NO_VARIABLE.search(text) is not None
    remedy = None
    if RANK_CONTEXT in item.config.stash:
        remedy = _MARKED if _TWICE in text or lacks_group else None
    elif lacks_group and SETTINGS not in item.stash and "RANK" not in os.environ:
        # Under a launcher (RANK is set), unmarked tests may create process groups themselves.
        remedy = _UNMARKED
    if remedy and remedy not in getattr(error, "__notes__", ()):
        error.add_note(remedy)
