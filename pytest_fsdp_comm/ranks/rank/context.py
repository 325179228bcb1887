"""What a rank of one test knows about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_fsdp_comm.gathering import Exchange
from pytest_fsdp_comm.options import Backend, RealAxis, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of one test."""

    rank: int
    """This rank, from 0."""
    local_rank: int
    """This rank on its machine, from 0."""
    local_world_size: int
    world_size: int
    ranks: tuple[int, ...]
    """The ranks that really run; fewer than `world_size` with the fake backend."""
    backend: Backend
    simulation: Simulation
    simulation_splits: tuple[float, ...] | None
    real: tuple[RealAxis, ...]
    finds_ranks: bool
    device: str
    """Where this rank's tensors belong: ``cpu`` or ``cuda:N``."""
    timeout_s: float
    directory: Path
    """Of the rank set, on this machine; gone after its last test."""
    exchange: Exchange
    store: Any
    """The store of torch on which the ranks make their process group."""


RANK_CONTEXT: Final = pytest.StashKey[RankContext]()
"""On the config's stash: present exactly in a rank."""
