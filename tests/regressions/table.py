"""The table: changes of a training step, and how both sides of one are recorded.

A case is a function of `changed` that gives a model and its step: the reviewed ones for False, the
changed ones for True.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_fsdp_comm.fixtures import mesh_sizes
from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.tree import profile as tree_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from pytest_fsdp_comm.comm.events import Recording
    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.recording.comm_mode import CommMode
    from pytest_fsdp_comm.tree.profile import TreeProfile

    Build = Callable[[bool], tuple[nn.Module | Sequence[nn.Module], Callable[[], object]]]

WORLD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A change of a training step."""

    name: str
    build: "Build"
    is_regression: bool
    """Whether nobody wanted it; otherwise it is deliberate, or has no effect on communication."""
    reported: str = ""
    """Project and number of the report, if there is one."""
    worlds: tuple[int, int] = (WORLD, WORLD)
    """World sizes before and after."""
    gloo: int = 0
    """How many real ranks it needs, in place of simulated ones; 0 for none."""
    is_silent: bool = False
    """Whether both sides communicate the same, so that only the tree can show it."""
    is_reversible: bool = False
    """Whether the way back is a case too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is recorded of one side of a case."""

    recording: "Recording"
    comm: "CommProfile"
    tree: "TreeProfile"


@dataclass(slots=True)
class Table:
    """Cases by name, in the order of their files."""

    cases: dict[str, Case] = field(default_factory=dict)

    def regression(self, build=None, **options):
        """Adds a change that nobody wanted, named as its function."""
        return self._add(build, is_regression=True, **options)

    def innocent(self, build=None, **options):
        """Adds a change that is deliberate, or has no effect."""
        return self._add(build, is_regression=False, **options)

    def _add(self, build, **options):
        if build is None:
            return lambda given: self._add(given, **options)
        name = build.__name__
        assert name not in self.cases, name
        self.cases[name] = Case(name=name, build=build, **options)
        return build


TABLE = Table()


def mesh(**axes):
    """A mesh of all simulated ranks; one axis `dp` unless axes are given."""
    sizes = mesh_sizes(axes or {"dp": -1}, dist.get_world_size())
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextmanager
def simulated(world_size):
    """Makes this process rank 0 of a fake group of its own, in place of the group that it has."""
    before = dist.get_world_size() if dist.is_initialized() else None
    _join(world_size)
    try:
        yield
    finally:
        _join(before)


def _join(world_size):
    if dist.is_initialized():
        dist.destroy_process_group()
    if world_size is not None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def record(case: Case, comm_mode: "CommMode", *, changed: bool) -> Side:
    """Records one side in a settled state, from the second step on."""
    with nullcontext() if case.gloo else simulated(case.worlds[changed]):
        torch.manual_seed(0)
        model, run = case.build(changed)
        run()
        with comm_mode(model):
            run()
        return Side(
            recording=comm_mode.recording,
            comm=comm_mode.profile,
            tree=tree_profile.fold(TreeFactory()(model)),
        )
