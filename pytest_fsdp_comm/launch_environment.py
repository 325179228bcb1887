"""Determine from the environment whether a launcher or this plugin started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Set by a pytest process that a launcher started or that is a spawned rank. If a test starts
# pytest, the new process inherits this variable, which keeps it from acting as a rank.
INSIDE_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCHED"
# Set for rank 0 under a launcher if pytest cannot fork that rank and starts a new process instead.
OWN_RANK_VARIABLE: Final = "PYTEST_FSDP_COMM_OWN_RANK"
# Set for a spawned rank: the path of a file with its `RankSetSpec`.
SPEC_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCH"
# Set for a spawned rank: its rank number, then the two file descriptors that `RunRank` takes.
RANK_VARIABLE: Final = "PYTEST_FSDP_COMM_RANK"

# The variables in which other launchers set rank, world size and local rank: mpirun of Open MPI,
# mpirun of MPICH and Intel MPI, and srun. Slurm also sets SLURM_PROCID and SLURM_LOCALID in batch
# scripts and salloc shells, which are single processes, but only srun sets SLURM_STEP_NUM_TASKS.
_OTHER_LAUNCHERS: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_LARGEST_PORT: Final = 65535
# Largest world size that can be simulated, 16 times the largest one measured so far.
MAX_SIMULATED: Final = 131_072
_HOST_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """This process's rank, as set by the launcher that started it."""

    rank: int
    world_size: int
    """Number of ranks in the launch, at least 2."""
    local_rank: int
    """Index of this rank on its machine, starting at 0."""
    local_world_size: int
    host: str
    port: int
    """TCP port of the store."""
    has_store: bool
    """Whether the launcher serves the store; if not, rank 0 does."""
    run_id: str
    """Distinguishes this run from other runs that use the same store."""
    launcher: str
    """Name to print: ``torchrun``, or the variables that the launcher set."""
    is_leader: bool
    """Whether this process reports and writes files for all ranks."""


def simulated_variables(rank: int, size: int, local_size: int | None = None) -> dict[str, str]:
    """Return the variables that torchrun sets on hosts with `local_size` ranks and no GPUs."""
    local_size = local_size or _HOST_SIZE
    local_rank = rank % local_size
    on_host = min(local_size, size - rank + local_rank)  # the last host may have fewer ranks
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = zip(names, map(str, (rank, size, local_rank, on_host)), strict=True)
    return {**dict(numbers), "CUDA_VISIBLE_DEVICES": ""}


def torchrun_variables(rank: int, size: int, local_size: int | None = None) -> dict[str, str]:
    """Return all variables that torchrun sets, as `simulated_variables` has some of them."""
    host = rank // (local_size or _HOST_SIZE)
    num_hosts = -(-size // (local_size or _HOST_SIZE))
    return {
        **simulated_variables(rank, size, local_size),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def missing_torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those of torchrun's variables that the ranks of a test do not have."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return {}
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    # The last host may have fewer ranks than the others, so check for hosts of the default size.
    is_default_host = simulated_variables(rank, size).items() <= environment.items()
    local_size = None if is_default_host else int(environment["LOCAL_WORLD_SIZE"])
    present = {*environment, "CUDA_VISIBLE_DEVICES"}
    variables = torchrun_variables(rank, size, local_size)
    return {name: value for name, value in variables.items() if name not in present}


def is_spawned_rank() -> bool:
    """Return whether another pytest process started this one as a rank."""
    return SPEC_VARIABLE in os.environ


def read_launched_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Read the launcher's variables; return None unless a launcher started several processes.

    Raises:
        ValueError: A variable is not a number in the expected range.
    """
    if INSIDE_VARIABLE in environment or not _has_rendezvous_variables(environment):
        return None
    world_size = _parse_variable(environment, "WORLD_SIZE", 1, None)
    rank = _parse_variable(environment, "RANK", 0, world_size - 1)
    port = _parse_variable(environment, "MASTER_PORT", 1, _LARGEST_PORT)
    if world_size == 1:
        return None
    environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), **environment}
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=_parse_variable(environment, "LOCAL_RANK", 0, rank),
        local_world_size=_parse_variable(environment, "LOCAL_WORLD_SIZE", 1, world_size),
        host=environment["MASTER_ADDR"],
        port=port,
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        run_id=f"{environment.get('TORCHELASTIC_RUN_ID', 'run')}.{restarts}",
        launcher="torchrun" if is_torchrun else "RANK and WORLD_SIZE",
        is_leader=rank == 0 and OWN_RANK_VARIABLE not in environment,
    )


def explain_separate_processes(environment: Mapping[str, str]) -> str:
    """Return an error text if mpirun or srun started ranks without torch's variables, else ""."""
    if INSIDE_VARIABLE in environment or _has_rendezvous_variables(environment):
        return ""
    for rank, size, local_rank in _OTHER_LAUNCHERS:
        if rank in environment and environment.get(size, "1") != "1":
            return (
                f"this is process {environment[rank]} of {environment[size]} that a launcher "
                f"started ({rank}, {size}) without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. "
                "Each process would run all tests and write the same files. Let the launcher "
                "start this command, with the host of rank 0 and a free port there:\n"
                f"    sh -c 'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} "
                "MASTER_ADDR=host0 MASTER_PORT=29500 python -m pytest'\n"
                f"If no launcher started this process, unset {rank}"
            )
    return ""


def _has_rendezvous_variables(environment: Mapping[str, str]) -> bool:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(environment.get(name) for name in names)


def _parse_variable(
    environment: Mapping[str, str], name: str, smallest: int, largest: int | None
) -> int:
    text = environment[name]
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if number < smallest or (largest is not None and number > largest):
        limits = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"environment variable {name}: expected a whole number {limits}, got {text!r}; "
            "launchers set it to describe the launched processes: correct it, or unset it so that "
            "this process starts the ranks of its tests"
        )
    return number
