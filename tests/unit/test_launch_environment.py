"""What a launcher's variables say."""

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, read_launched_rank

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


def test_variables_of_torch_win_over_those_of_slurm():
    launched = read_launched_rank({**SLURM, "RANK": "0", "WORLD_SIZE": "2"})
    assert (launched.rank, launched.world_size, launched.local_rank) == (0, 2, 0)
    assert launched.is_leader


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MASTER,
        {"RANK": "0", **MASTER},
        # One process starts its ranks itself.
        {"RANK": "0", "WORLD_SIZE": "1", **MASTER},
        # A batch script of SLURM, which runs once for all tasks, and names no place to meet.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": ""},
        # A pytest that a test of a launched pytest runs.
        {**TORCHRUN, INSIDE_VARIABLE: "1"},
    ],
)
def test_no_rank_is_read_where_no_launcher_started_ranks(environment):
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
