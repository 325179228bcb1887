"""Reads from the environment what started this process: an outside launcher, or this plugin."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# Environment variable that a launched pytest sets: a pytest that one of its tests runs inherits the
# launcher's variables, but is not one of its ranks.
INSIDE_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCHED"
# Environment variable of a spawned rank: the path of its `RankSetSpec`.
SPEC_VARIABLE: Final = "PYTEST_FSDP_COMM_LAUNCH"
# Environment variable of a spawned rank: its number, then the descriptors of `RunRank`.
RANK_VARIABLE: Final = "PYTEST_FSDP_COMM_RANK"

# Note [What launchers tell]: torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; so do
# many scripts. Under mpirun and srun the first two may be absent, and variables of their own hold
# the same; the last two are the user's to set. mpirun comes before SLURM, which may have started
# its daemons, as a step of one task for each machine.
#
# Only srun sets SLURM_STEP_NUM_TASKS. A batch script runs once, although SLURM_PROCID is 0 in it
# and SLURM_NTASKS the job's; the shell of salloc is a step of one task (tried with Slurm 22.05,
# read in env_array_for_step of its src/common/env.c). How many tasks each node has SLURM writes in
# short: `4(x2),2` is 4, 4 and 2.


class _Launcher(NamedTuple):
    """The variables by which a launcher tells a process its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    """Empty where SLURM's short form tells it."""
    command: str = ""
    """How to give processes a place to meet; empty where they have one."""


_MPIRUN = "mpirun -np {size} -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 python -m pytest"
# Within a task, since the machines of a job are not known before.
_SRUN = (
    "srun -n {size} bash -c 'MASTER_ADDR=$(scontrol show hostnames "
    '"$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500 python -m pytest\''
)
_TORCHRUN = _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Launcher(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun -np {size} -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 python -m pytest",
)
# MPICH's and Intel's mpirun
_HYDRA = _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", _MPIRUN)
_SLURM_STEP = _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", _SRUN)
_PMI = _Launcher("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", _MPIRUN)
_SLURM = _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", _SRUN)
# The first describes the tasks of this `srun`, the others may be those of the whole job.
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_TASKS = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?", re.ASCII)
_LARGEST_PORT = 65535
_REMEDY = (
    "launchers set it to describe the launched processes: correct it, or unset it to have this "
    "process start the ranks of its tests"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """One of the processes that a launcher started, each for one rank."""

    rank: int
    """This rank, from 0."""
    world_size: int
    """All ranks; at least 2."""
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
    """What started the ranks, for texts: ``torchrun``, or the names of the variables it set."""

    @property
    def variables(self) -> str:
        """What to unset where no launcher started this process."""
        return "RANK and WORLD_SIZE" if self.launcher == "torchrun" else self.launcher

    @property
    def is_leader(self) -> bool:
        """Whether this rank reports and writes for all."""
        return self.rank == 0


def is_spawned_rank() -> bool:
    """Whether this pytest process was started as a rank, by the pytest process of its session."""
    return SPEC_VARIABLE in os.environ


def read_launched_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Read the launcher's variables; ValueError says what was expected of one, and what came."""
    # None if no launcher started this process, if it started one only (which starts the ranks of
    # its tests itself), or if it names no store to meet at (as in a SLURM batch script, which is
    # not started once for each task).
    # None if no launcher started this process, if it started one only (which starts the ranks of
    # its tests itself), or if it names no store to meet at (as in a SLURM batch script, which is
    # not started once for each task).
    launcher = _find_launcher(environment)
    if launcher is None or not _has_address(environment):
        return None
    world_size = _number(environment, launcher.size, 1, None)
    rank = _number(environment, launcher.rank, 0, world_size - 1)
    port = _number(environment, "MASTER_PORT", 1, _LARGEST_PORT)
    if world_size == 1:
        return None
    local_rank, local_world_size = rank, world_size
    if launcher.local_rank in environment:
        local_rank = _number(environment, launcher.local_rank, 0, rank)
    if not launcher.local_size:
        local_world_size = _slurm_local_world_size(environment, world_size)
    elif launcher.local_size in environment:
        local_world_size = _number(environment, launcher.local_size, 1, world_size)
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=environment["MASTER_ADDR"],
        port=port,
        has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        run_id=f"{environment.get('TORCHELASTIC_RUN_ID', 'run')}.{restarts}",
        launcher="torchrun" if is_torchrun else f"{launcher.rank} and {launcher.size}",
    )


def explain_separate_processes(environment: Mapping[str, str]) -> str:
    """Say what to do where a launcher started processes that cannot meet; empty elsewhere."""
    # Each would run the whole session, and write the same files.
    launcher = _find_launcher(environment)
    if launcher is None or launcher is _SLURM or _has_address(environment):
        return ""
    rank, size = environment[launcher.rank], environment[launcher.size]
    # The shell of srun --pty is the first task, and the only one that a user types in. What is
    # started from it, or from the shell of salloc, inherits the variable, but not the terminal.
    is_shell = rank == "0" and launcher is _SLURM_STEP and "SLURM_PTY_PORT" in environment
    if size == "1" or (is_shell and _has_terminal()):
        return ""
    return (
        f"this is process {rank} of {size} that a launcher started ({launcher.rank}, "
        f"{launcher.size}), and without MASTER_ADDR and MASTER_PORT they cannot meet: each would "
        "run all tests and write the same files. Say where rank 0 is:\n"
        f"    {launcher.command.format(size=size)}\n"
        f"or use torch's launcher:\n    torchrun --nproc-per-node {size} -m pytest\n"
        "or start pytest once, without a launcher: it starts the ranks of its tests itself (where "
        f"this is so, unset {launcher.rank})"
    )


def _find_launcher(environment: Mapping[str, str]) -> _Launcher | None:
    """Find what started this process; see Note [What launchers tell]."""
    if INSIDE_VARIABLE in environment:
        return None
    for launcher in (_TORCHRUN, _OPEN_MPI, _HYDRA, _SLURM_STEP, _PMI, _SLURM):
        is_something_else = (
            (launcher is _TORCHRUN and not _has_address(environment))
            # SLURM's PMI, where it has the rank on the machine.
            or (launcher is _HYDRA and launcher.local_rank not in environment)
            # No step of the job: its batch script.
            or (launcher is _SLURM and "SLURM_JOB_ID" in environment)
        )
        is_told = launcher.rank in environment and launcher.size in environment
        if is_told and not is_something_else:
            return launcher
    return None


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _has_address(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"))


def _number(environment: Mapping[str, str], name: str, smallest: int, largest: int | None) -> int:
    text = environment[name]
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if number < smallest or (largest is not None and number > largest):
        limits = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"environment variable {name}: expected a whole number {limits}, got {text!r}; "
            f"{_REMEDY}"
        )
    return number


def _slurm_local_world_size(environment: Mapping[str, str], world_size: int) -> int:
    name = next((name for name in _TASKS_PER_NODE if environment.get(name)), None)
    if name is None:
        return world_size
    counts = _tasks_per_node(name, environment[name])
    node = 0
    if len({*counts}) > 1:
        if "SLURM_NODEID" not in environment:
            raise ValueError(
                f"environment variable {name}={environment[name]}: nodes have different numbers of "
                "tasks, so SLURM_NODEID must say which one this is, and it is not set; srun does"
            )
        node = _number(environment, "SLURM_NODEID", 0, len(counts) - 1)
    # A job's numbers can be larger than those of one of its steps.
    return min(counts[node], world_size)


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Read SLURM's short form, such as ``4(x2),2``, into a number for each node."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(
                f"environment variable {name}: expected the number of tasks of each node, such as "
                f"4, 4(x2) for two nodes alike, or 4(x2),2; got {text!r}; {_REMEDY}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
