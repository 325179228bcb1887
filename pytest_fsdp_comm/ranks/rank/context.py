"""What a rank of one test knows about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from pytest_fsdp_comm.options import Backend, RealAxis, Simulation
from pytest_fsdp_comm.ranks.wire.exchange import RankExchange
from pytest_fsdp_comm.ranks.wire.rank_set import StoreAddress


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
    exchange: RankExchange
    store: StoreAddress | None
    """Where the ranks make their process group; None if through a file in `directory`."""


RANK_CONTEXT: Final = pytest.StashKey[RankContext]()
"""On the config's stash: present exactly in a rank."""
