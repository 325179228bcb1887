"""The table: changes of a training step, and how both sides of one are recorded.

A case is a function of `changed` that gives a model and its step: the reviewed ones for False, the
changed ones for True.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from texts import parse_comm, parse_trees
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_fsdp_comm.comm.cost import Cost
from pytest_fsdp_comm.fixtures import mesh_sizes
from pytest_fsdp_comm.fsdp_tree import TreeFactory
from pytest_fsdp_comm.gathering import gather_values
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.tree.profile import merge, tree_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from pytest_fsdp_comm.comm.diff import Comparison
    from pytest_fsdp_comm.comm.events import Recording
    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.recording.comm_mode import CommMode
    from pytest_fsdp_comm.tree.profile import TreeProfile

    Build = Callable[[bool], tuple[nn.Module | Sequence[nn.Module], Callable[[], object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A change of a training step."""

    name: str
    build: "Build"
    is_regression: bool
    """Whether nobody wanted it; otherwise it is deliberate, or has no effect on communication."""
    reported: str = ""
    """Project and number of the report, if there is one."""
    worlds: tuple[int, int] = (4, 4)
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
    """The mesh of all simulated ranks with these axes; one axis `dp` unless some are given."""
    sizes = mesh_sizes(axes or {"dp": -1}, dist.get_world_size())
    return _mesh(dist.group.WORLD, tuple(sizes.items()))


@cache
def _mesh(_group, sizes):
    names, lengths = zip(*sizes, strict=True)
    return init_device_mesh("cpu", lengths, mesh_dim_names=names)


def simulate(world_size):
    """Makes this process rank 0 of a fake group of that size, in place of its group."""
    if dist.is_initialized():
        if dist.get_world_size() == world_size:
            return
        dist.destroy_process_group()
    # DTensor remembers results by meshes, and meshes of equal ranks and names are equal to it: it
    # would answer with the groups that are gone.
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.7
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def record(case: Case, comm_mode: "CommMode", *, changed: bool) -> Side:
    """Records one side in a settled state, on all ranks."""
    if not case.gloo:
        simulate(case.worlds[changed])
    torch.manual_seed(0)
    model, run = case.build(changed)
    # DDP makes its buckets anew in the second step.
    for _ in range(2 if case.gloo else 1):
        run()
    with comm_mode(model):
        run()
    return side_of(comm_mode, model)


def side_of(comm_mode: "CommMode", model: "nn.Module | Sequence[nn.Module]") -> Side:
    """What was recorded last, and the tree of its model, of all ranks."""
    tree = TreeFactory()(model)
    facts = gather_values(comm_mode._gather, "fsdp_tree", tree_facts(tree))
    return Side(
        recording=comm_mode.recording,
        comm=comm_mode.merged_profile(),
        tree=merge(dict(enumerate(facts)), backend=tree.backend, torch_version=tree.torch_version),
    )


def both_sides(old: Side, new: Side):
    """Their texts by file name, each read again."""
    texts = {}
    for stem, side in (("old", old), ("new", new)):
        texts[f"{stem}.comm"] = comm_text.format_profile(side.comm)
        assert parse_comm(texts[f"{stem}.comm"]) == side.comm
        texts[f"{stem}.tree.comm"] = tree_text.format_profile(side.tree)
        assert parse_trees(texts[f"{stem}.tree.comm"]) == side.tree
    return texts


def write(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def told(comparison: "Comparison") -> list[str]:
    """What is told of a change: without its head, its cost, and where in the code it was."""
    shown = render_comparison(replace(comparison, cost=Cost()), snapshot="s").body
    lines = r"\S+:\d+(?:,? \S+:\d+| or| and| \d+ more)*$"
    places = rf"(?:, requested by .+?)?,(?: called from| at) {lines}"
    return [re.sub(places, "", line.strip()) for line in shown]
