"""Reads from the environment what started this process: an outside launcher, or this plugin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Environment variable that a launched pytest sets: a pytest that one of its tests runs inherits the
# launcher's variables, but is not one of its ranks.
INSIDE_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCHED"
# Environment variable of the process that rank 0's pytest process starts as its rank, where it
# cannot be forked.
OWN_RANK_VARIABLE: Final = "PYTEST_FSDP_COMM_OWN_RANK"
# Environment variable of a spawned rank: the path of its `RankSetSpec`.
SPEC_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCH"
# Environment variable of a spawned rank: its number, then the descriptors of `RunRank`.
RANK_VARIABLE: Final = "PYTEST_FSDP_COMM_RANK"

# The rank, the number of processes and the rank on the machine, as other launchers call them:
# Open MPI's mpirun, that of MPICH and Intel MPI, and srun. Only srun sets SLURM_STEP_NUM_TASKS: a
# batch script and the shell of salloc have the other variables too, but run once.
_OTHER_LAUNCHERS: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_LARGEST_PORT: Final = 65535
# Largest simulated world size: 16 times the largest mesh that the recorder was measured on.
MAX_SIMULATED: Final = 131_072
_HOST_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """One of the processes that a launcher started, each for one rank."""

    rank: int
    world_size: int
    """At least 2."""
    local_rank: int
    """This rank on its machine, from 0."""
    local_world_size: int
    host: str
    port: int
    """The store's TCP port."""
    has_store: bool
    """Whether the launcher serves the store; otherwise rank 0 does."""
    run_id: str
    """Differs between runs that share a store."""
    launcher: str
    """What started the ranks, for texts: ``torchrun``, or the variables it set."""
    is_leader: bool
    """Whether this process reports and writes for all ranks."""


def simulated_variables(rank: int, size: int, local_size: int | None = None) -> dict[str, str]:
    """The variables that torchrun would set on a host of, by default, 8 ranks; GPUs are hidden."""
    local_size = local_size or _HOST_SIZE
    local_rank = rank % local_size
    here = min(local_size, size - rank + local_rank)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = zip(names, map(str, (rank, size, local_rank, here)), strict=True)
    return {**dict(numbers), "CUDA_VISIBLE_DEVICES": ""}


def is_spawned_rank() -> bool:
    """Whether this pytest process was started as a rank, by the pytest process of its session."""
    return SPEC_VARIABLE in os.environ


def read_launched_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Read the launcher's variables; ValueError says what was expected of one, and what came.

    Returns None if no launcher started this process, or if it started only one, which starts the
    ranks of its tests itself.
    """
    if INSIDE_VARIABLE in environment or not _are_set(environment):
        return None
    world_size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, world_size - 1)
    port = _number(environment, "MASTER_PORT", 1, _LARGEST_PORT)
    if world_size == 1:
        return None
    environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), **environment}
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", 0, rank),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1, world_size),
        host=environment["MASTER_ADDR"],
        port=port,
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        run_id=f"{environment.get('TORCHELASTIC_RUN_ID', 'run')}.{restarts}",
        launcher="torchrun" if is_torchrun else "RANK and WORLD_SIZE",
        is_leader=rank == 0 and OWN_RANK_VARIABLE not in environment,
    )


def explain_separate_processes(environment: Mapping[str, str]) -> str:
    """Say what to do where a launcher started processes that cannot meet; empty elsewhere."""
    if INSIDE_VARIABLE in environment or _are_set(environment):
        return ""
    for rank, size, local_rank in _OTHER_LAUNCHERS:
        if rank in environment and environment.get(size, "1") != "1":
            return (
                f"this is process {environment[rank]} of {environment[size]} that a launcher "
                f"started ({rank}, {size}), and without RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT each would run all tests and write the same files. Let the launcher "
                "start this, with the host of rank 0 and a free port on it:\n"
                f"    sh -c 'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} "
                "MASTER_ADDR=host0 MASTER_PORT=29500 python -m pytest'\n"
                f"If no launcher started this process, unset {rank}"
            )
    return ""


def _are_set(environment: Mapping[str, str]) -> bool:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(environment.get(name) for name in names)


def _number(environment: Mapping[str, str], name: str, smallest: int, largest: int | None) -> int:
    text = environment[name]
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if number < smallest or (largest is not None and number > largest):
        limits = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"environment variable {name}: expected a whole number {limits}, got {text!r}; "
            "launchers set it to describe the launched processes: correct it, or unset it to have "
            "this process start the ranks of its tests"
        )
    return number
