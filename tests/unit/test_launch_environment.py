"""What a launcher's variables say."""

import pytest

from pytest_fsdp_comm import launch_environment
from pytest_fsdp_comm.launch_environment import (
    INSIDE_VARIABLE,
    explain_separate_processes,
    read_launched_rank,
)

MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **MASTER,
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", **MASTER}
# As seen under mpirun of Open MPI 4.1 and MPICH 4.0, with two machines.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
# As Slurm's src/common/env.c sets them: a batch script, a step in it, the shell of salloc.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SHELL = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
# mpirun starts a daemon on each machine by srun.
DAEMON = {**BATCH, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}


def test_torchrun_sets_rank_sizes_host_and_store():
    launched = read_launched_rank(TORCHRUN)
    assert (launched.rank, launched.world_size) == (9, 16)
    assert (launched.local_rank, launched.local_world_size) == (1, 8)
    assert (launched.host, launched.port, launched.has_store) == ("host0", 29500, True)
    assert (launched.run_id, launched.launcher) == ("job.2", "torchrun")
    assert not launched.is_leader


def test_slurm_sets_rank_and_sizes_but_no_store():
    launched = read_launched_rank(SLURM)
    assert (launched.rank, launched.world_size) == (3, 4)
    assert (launched.local_rank, launched.local_world_size) == (1, 4)
    assert launched.launcher == "SLURM_PROCID and SLURM_NTASKS"
    assert not launched.has_store
    assert read_launched_rank({**SLURM, "SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "5,5", "SLURM_NTASKS_PER_NODE": "5"}, 5),
        # Of a job of 8 tasks a node, a step of 10.
        ({"SLURM_STEP_TASKS_PER_NODE": "5(x2)", "SLURM_TASKS_PER_NODE": "8(x4)"}, 5),
        # And one of 10 on a single node, by an older srun.
        ({"SLURM_TASKS_PER_NODE": "16"}, 10),
        ({"SLURM_TASKS_PER_NODE": ""}, 10),
    ],
)
def test_slurm_abbreviates_tasks_per_node(variables, expected):
    environment = {**SLURM, "SLURM_NTASKS": "10", **variables}
    assert read_launched_rank(environment).local_world_size == expected


@pytest.mark.parametrize("text", ["4(x)", "4x2", "(x2)", "4(x2),", "0", "4(x0)", "-4", "four", "٤"])
def test_other_forms_of_tasks_per_node_are_errors(text):
    with pytest.raises(ValueError, match="environment variable ") as caught:
        read_launched_rank({**SLURM, "SLURM_TASKS_PER_NODE": text})
    assert str(caught.value) == (
        "environment variable SLURM_TASKS_PER_NODE: expected the number of tasks of each node, "
        f"such as 4, 4(x2) for two nodes alike, or 4(x2),2; got {text!r}; launchers set it to "
        "describe the launched processes: correct it, or unset it to have this process start the "
        "ranks of its tests"
    )


def test_nodes_of_different_sizes_need_the_number_of_this_node():
    environment = {**SLURM, "SLURM_TASKS_PER_NODE": "3,1"}
    with pytest.raises(ValueError, match="SLURM_NODEID must say which one this is, and it is not"):
        read_launched_rank(environment)
    with pytest.raises(ValueError, match="SLURM_NODEID: expected a whole number from 0 to 1, got"):
        read_launched_rank({**environment, "SLURM_NODEID": "2"})


def test_variables_of_torch_win_over_those_of_slurm():
    launched = read_launched_rank({**SLURM, "RANK": "0", "WORLD_SIZE": "2"})
    assert (launched.rank, launched.world_size, launched.local_rank) == (0, 2, 0)
    assert launched.is_leader


@pytest.mark.parametrize("inside", [{}, DAEMON], ids=["alone", "in_slurm"])
@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["openmpi", "hydra"])
def test_mpirun_sets_ranks_and_sizes(variables, inside):
    launched = read_launched_rank({**inside, **variables, **MASTER})
    assert (launched.rank, launched.world_size) == (2, 4)
    assert (launched.local_rank, launched.local_world_size) == (0, 2)
    rank, size, *_ = variables
    assert launched.launcher == launched.variables == f"{rank} and {size}"
    assert not launched.has_store


def test_variables_of_torch_win_over_those_of_mpirun():
    assert read_launched_rank({**OPEN_MPI, **HYDRA, **TORCHRUN}).rank == 9
    # A script that sets them, but no place to meet, starts no ranks.
    assert read_launched_rank({**OPEN_MPI, "RANK": "9", "WORLD_SIZE": "16"}) is None


def test_a_slurm_step_has_its_own_number_of_tasks():
    environment = {**STEP, **MASTER, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    launched = read_launched_rank({**environment, "SLURM_LOCALID": "1"})
    assert (launched.rank, launched.world_size, launched.local_world_size) == (1, 2, 2)
    # srun --mpi=pmi2: what it says of machines is in SLURM's variables alone.
    pmi2 = {**STEP, **MASTER, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    launched = read_launched_rank({**pmi2, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (launched.rank, launched.local_rank) == (3, 1)


@pytest.mark.parametrize(
    ("environment", "named", "command"),
    [
        (
            OPEN_MPI,
            "process 2 of 4 that a launcher started (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
            "mpirun -np 4 -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 python -m pytest",
        ),
        (
            {**DAEMON, **HYDRA},
            "process 2 of 4 that a launcher started (PMI_RANK, PMI_SIZE)",
            "mpirun -np 4 -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 python -m pytest",
        ),
        (
            STEP,
            "process 0 of 4 that a launcher started (SLURM_PROCID, SLURM_STEP_NUM_TASKS)",
            'srun -n 4 bash -c \'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n 1) MASTER_PORT=29500 python -m pytest'",
        ),
        # Started from a shell with a terminal, whose variables srun passes on.
        ({**STEP, "SLURM_PROCID": "1", "SLURM_PTY_PORT": "4"}, "process 1 of 4", "srun -n 4"),
        ({**STEP, "SLURM_PTY_PORT": "4"}, "process 0 of 4", "srun -n 4"),
        # Of other launchers with the same interface; a script that names no place to meet.
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4"}, "process 0", "-genv"),
        ({**OPEN_MPI, "MASTER_ADDR": "host0"}, "process 2 of 4", "-x MASTER_PORT=29500"),
    ],
)
def test_processes_without_an_address_get_the_remedy(monkeypatch, environment, named, command):
    monkeypatch.setattr(launch_environment, "_has_terminal", lambda: False)
    assert read_launched_rank(environment) is None
    text = explain_separate_processes(environment)
    assert text.startswith("this is process ")
    assert f"{named}" in text
    assert "without MASTER_ADDR and MASTER_PORT they cannot meet: each would run all tests" in text
    assert command in text
    assert "\n    torchrun --nproc-per-node 4 -m pytest\n" in text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TORCHRUN,
        {**OPEN_MPI, **MASTER},
        {"RANK": "0", "WORLD_SIZE": "2"},
        BATCH,
        SHELL,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        # The first task of srun -n 4 --pty bash
        {**STEP, "SLURM_PTY_PORT": "45001"},
        # One process, or one that has initialised MPI itself.
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "1"},
        # A pytest that a test of a launched pytest runs.
        {**OPEN_MPI, INSIDE_VARIABLE: "1"},
        {**STEP, INSIDE_VARIABLE: "1"},
    ],
)
def test_one_process_or_processes_with_an_address_get_no_remedy(monkeypatch, environment):
    monkeypatch.setattr(launch_environment, "_has_terminal", lambda: True)
    assert explain_separate_processes(environment) == ""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # What runs beside steps, after an address for them was exported.
        {**BATCH, **MASTER},
        {**SHELL, **MASTER},
        {**OPEN_MPI, **MASTER, INSIDE_VARIABLE: "1"},
        {**HYDRA, **MASTER, "PMI_RANK": "0", "PMI_SIZE": "1"},
        MASTER,
        {"RANK": "0", **MASTER},
        # One process starts its ranks itself.
        {"RANK": "0", "WORLD_SIZE": "1", **MASTER},
        # A batch script of SLURM, which runs once for all tasks, and names no place to meet.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "many"},
        # An interactive shell within a job.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "4(x2)", **MASTER},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": ""},
        # A pytest that a test of a launched pytest runs.
        {**TORCHRUN, INSIDE_VARIABLE: "1"},
    ],
)
def test_without_a_launcher_no_rank_is_read(environment):
    assert read_launched_rank(environment) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": "-1"}, "RANK: expected a whole number from 0 to 15, got '-1'"),
        ({"RANK": "16"}, "RANK: expected a whole number from 0 to 15, got '16'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE: expected a whole number of at least 1, got 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number of at least 1, got '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: expected a whole number from 1 to 65535, got"),
        ({"LOCAL_RANK": "10"}, "LOCAL_RANK: expected a whole number from 0 to 9, got '10'"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE: expected a whole number from 1 to 16, got"),
    ],
)
def test_bad_values_name_their_variable_and_the_remedy(changes, text):
    with pytest.raises(ValueError, match="environment variable ") as caught:
        read_launched_rank({**TORCHRUN, **changes})
    assert str(caught.value).startswith(f"environment variable {text}")
    assert "correct it, or unset it" in str(caught.value)
