"""Ranks and errors from the environment variables of launchers."""

import pytest

from pytest_fsdp_comm.launch_environment import (
    INSIDE_VARIABLE,
    explain_separate_processes,
    missing_torchrun_variables,
    read_launched_rank,
    simulated_variables,
    torchrun_variables,
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
# Values of mpirun from Open MPI 4.1 and MPICH 4.0, on two machines.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
# Values from Slurm's src/common/env.c: a batch script, a step in it, the shell of salloc.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SHELL = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def test_torchrun_sets_rank_sizes_host_and_store():
    launched = read_launched_rank(TORCHRUN)
    assert (launched.rank, launched.world_size) == (9, 16)
    assert (launched.local_rank, launched.local_world_size) == (1, 8)
    assert (launched.host, launched.port, launched.has_store) == ("host0", 29500, True)
    assert (launched.run_id, launched.launcher) == ("job.2", "torchrun")
    assert not launched.is_leader


def test_without_local_variables_there_is_one_host():
    launched = read_launched_rank({**OPEN_MPI, **MASTER, "RANK": "0", "WORLD_SIZE": "2"})
    assert (launched.local_rank, launched.local_world_size) == (0, 2)
    assert (launched.launcher, launched.has_store) == ("RANK and WORLD_SIZE", False)
    assert launched.is_leader


@pytest.mark.parametrize(
    ("rank", "size", "local_size", "local_rank", "host_size"),
    [
        (0, 8192, None, 0, 8),
        (13, 20, None, 5, 8),
        (17, 20, None, 1, 4),
        (1, 2, None, 1, 2),
        (7, 8192, 4, 3, 4),
        (8, 9, 3, 2, 3),
    ],
)
def test_simulated_variables_describe_a_host(rank, size, local_size, *, local_rank, host_size):
    assert simulated_variables(rank, size, local_size) == {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(host_size),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.parametrize(("rank", "local_size"), [(0, None), (17, None), (0, 4), (13, 4)])
def test_missing_torchrun_variables_complete_a_rank(rank, local_size):
    environment = simulated_variables(rank, 20, local_size)
    missing = missing_torchrun_variables(environment)
    assert missing.keys().isdisjoint(environment)
    assert environment | missing == torchrun_variables(rank, 20, local_size)
    assert missing_torchrun_variables(environment | missing) == {}


def test_missing_torchrun_variables_leave_gpus_visible():
    real = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    missing = missing_torchrun_variables({**real, "MASTER_ADDR": "host0"})
    assert "CUDA_VISIBLE_DEVICES" not in missing
    assert (missing["GROUP_WORLD_SIZE"], missing["MASTER_PORT"]) == ("1", "29500")
    assert "MASTER_ADDR" not in missing
    assert missing_torchrun_variables({"RANK": "1"}) == {}


@pytest.mark.parametrize(
    ("environment", "process", "line"),
    [
        (
            OPEN_MPI,
            "process 2 of 4 that a launcher started (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
            "sh -c 'RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
            "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK MASTER_ADDR=host0 MASTER_PORT=29500 "
            "python -m pytest'",
        ),
        ({**HYDRA, **MASTER}, "process 2 of 4", "RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE"),
        (STEP, "process 0 of 4", "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS"),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "4"}, "process 2 of 4", "RANK=$OMPI"),
    ],
)
def test_separate_processes_get_a_command_line(environment, process, line):
    assert read_launched_rank(environment) is None
    text = explain_separate_processes(environment)
    assert f"this is {process}" in text
    assert line in text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MASTER,
        {"RANK": "0", **MASTER},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": ""},
        # A single process starts the ranks itself.
        {"RANK": "0", "WORLD_SIZE": "1", **MASTER},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        # A process outside of steps, after the user exported an address for the steps.
        {**BATCH, **MASTER},
        {**SHELL, **MASTER},
        # A pytest that a test of a launched pytest starts.
        {**TORCHRUN, INSIDE_VARIABLE: "1"},
        {**OPEN_MPI, INSIDE_VARIABLE: "1"},
    ],
)
def test_rank_without_a_launcher_is_none(environment):
    assert read_launched_rank(environment) is None
    assert explain_separate_processes(environment) == ""


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
