"""Changes that lose overlap say so first; innocent ones do not speak of it."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from regressions.lost_overlap import INNOCENT, LOSSES, RANKS, base
from regressions.table import told

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.explanation.overlap import Waits

# Torch warns about some of these cases.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.distributed(
        world_size=RANKS, simulate=True, simulation_splits="even", device="cuda", scope="module"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    profile: Any
    exposed: Counter
    """The exposed calls, keyed by phase and kind, and owner."""
    num_hidden: int


def record(comm_mode, model, run):
    torch.manual_seed(0)
    with comm_mode(model):
        run()
    exposed = Counter(
        (f"{event.phase} {event.kind}", event.owner) for event in comm_mode.events if event.exposed
    )
    num_hidden = len(comm_mode.events) - exposed.total()
    return Side(profile=comm_mode.profile, exposed=exposed, num_hidden=num_hidden)


def both_sides(build, comm_mode):
    steps = build(False), build(True)  # noqa: FBT003  # as in `table.py`
    return [record_base(comm_mode) if step is None else record(comm_mode, *step) for step in steps]


def record_base(comm_mode):
    if dist.group.WORLD not in _bases:
        _bases[dist.group.WORLD] = record(comm_mode, *base())
    return _bases[dist.group.WORLD]


_bases = {}


def test_base_exposes_four_calls(comm_mode):
    assert record_base(comm_mode).exposed == Counter(
        (call, owner)
        for call in ("forward all_gather", "backward reduce_scatter")
        for owner in ("", "layers.0")
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_named_first(comm_mode, name):
    case = LOSSES[name]
    old, new = both_sides(case.build, comm_mode)
    expected = Counter((call, owner) for call, owners in case.exposes.items() for owner in owners)
    assert new.exposed - old.exposed == expected
    assert old.exposed - new.exposed == Counter()
    comparison = compare(old.profile, new.profile)
    lines = told(comparison)
    assert tuple(lines[: len(case.first)]) == case.first
    assert case.first
    # Nobody speaks of overlap that is not lost.
    assert bool(comparison.exposures) == any("can no longer be hidden" in line for line in lines)
    assert comparison.exposures == () or expected
    assert compare(new.profile, new.profile).changes == ()


@pytest.mark.parametrize("name", INNOCENT)
def test_innocent_change_loses_no_overlap(comm_mode, name):
    old, new = both_sides(INNOCENT[name], comm_mode)
    assert all(side.exposed and side.num_hidden for side in (old, new))
    comparison = compare(old.profile, new.profile)
    explanation = comparison.explanation
    assert comparison.exposures == ()
    assert explanation is None or not any(isinstance(s, Waits) for s in explanation.steps)
    assert [line for line in told(comparison) if "hidden" in line or "waits" in line] == []


def test_cases_are_enough():
    losing = [case for case in LOSSES.values() if case.exposes]
    assert len(losing) >= 14
    assert len(INNOCENT) >= 30
    assert len({case.thread for case in LOSSES.values()} - {""}) >= 10
