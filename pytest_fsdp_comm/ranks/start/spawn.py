"""Ranks as fresh pytest processes, where forking is unsafe: slow, but independent of the parent."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE
from pytest_fsdp_comm.ranks.rank.context import LAUNCH_VARIABLE, RANK_VARIABLE
from pytest_fsdp_comm.ranks.rank.gpus import visible_gpus_variable
from pytest_fsdp_comm.ranks.rank.main import RankTemplate
from pytest_fsdp_comm.ranks.start.ending import PATIENCE_S, descendants, kill, kill_groups
from pytest_fsdp_comm.ranks.start.slots import HeldSlots
from pytest_fsdp_comm.ranks.wire.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.ranks.wire.extension import RankExtension


class SpawnedRanks:
    """One set of spawned ranks, seen from the pytest process."""

    def __init__(self, config: pytest.Config, launch: Launch) -> None:
        """Starts a pytest process for each rank, with the arguments of this one."""
        told = launch.directory / "launch.json"
        told.write_text(launch.dump(), encoding="utf-8")
        arguments = [str(argument) for argument in config.invocation_params.args]
        if config.pluginmanager.has_plugin("xdist"):
            arguments += ["-n", "0"]
        if config.pluginmanager.has_plugin("randomly"):
            # Each rank would choose a seed of its own.
            arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
        self._held = HeldSlots(launch.slots)
        # A rank resolves its markers by what was launched, as this process did.
        inherited = {name: text for name, text in os.environ.items() if name != INSIDE_VARIABLE}
        environment = {**inherited, LAUNCH_VARIABLE: str(told)}
        if launch.gpus:
            # Here already: what made forking unsafe may be that collecting starts CUDA.
            environment[visible_gpus_variable(environment)] = ",".join(launch.gpus)
        self._processes = {}
        for rank in launch.ranks:
            with (
                launch.log_path(rank, "stdout").open("ab") as stdout,
                launch.log_path(rank, "stderr").open("ab") as stderr,
            ):
                self._processes[rank] = subprocess.Popen(  # noqa: S603  # pytest itself
                    [sys.executable, "-m", "pytest", *arguments],
                    cwd=config.invocation_params.dir,
                    env={**environment, RANK_VARIABLE: str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=launch.terminal,
                    # Not a session of its own, which could not read the terminal.
                    process_group=0,
                )

    def fileno(self) -> None:
        """There is no such descriptor; the supervisor polls."""

    def exit_statuses(self) -> dict[int, int]:
        """The ranks that ended, with exit status or minus signal number."""
        polled = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: status for rank, status in polled.items() if status is not None}

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank, if it still lives."""
        self._processes[rank].send_signal(number)

    def rest(self) -> None:
        """Ends them: spawned ranks run one test."""
        self.end(PATIENCE_S)

    def resume(self) -> bool:
        """They never live on."""
        return False

    def end(self, within_s: float) -> dict[int, int]:
        """Kills what is left, and waits until it is gone, but not for longer."""
        running = [process.pid for process in self._processes.values() if process.poll() is None]
        below = [pid for rank in running for pid in descendants(rank)]
        kill_groups(process.pid for process in self._processes.values())
        kill([*running, *below])
        until = time.monotonic() + within_s
        alive = {}
        for rank, process in self._processes.items():
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                alive[rank] = process.pid
                # Or else it would warn, later, of a process that nobody waited for.
                process.returncode = -signal.SIGKILL
        self._held.release()
        return alive


def select_own_test(config: pytest.Config) -> None:
    """Makes a spawned rank collect its own test only."""
    launch = _read_launch()
    config.args[:] = [str(config.rootpath / launch.nodeid)]
    # The supervisor's deadline and verdict count; a rank stops for nothing else.
    config.option.maxfail = 0


def become_rank(session: pytest.Session, extensions: Sequence[RankExtension]) -> NoReturn:
    """Runs the rank that this process was started as.

    Raises:
        pytest.UsageError: The test was not collected again.
    """
    launch = _read_launch()
    places = [place for place, item in enumerate(session.items) if item.nodeid == launch.nodeid]
    if not places:
        raise pytest.UsageError(
            f"{launch.nodeid} is not there when it is collected a second time, by a rank; tests "
            "whose names depend on chance, time or the process cannot run on spawned ranks"
        )
    rank = int(os.environ.pop(RANK_VARIABLE))
    # Tests that run pytest themselves must not take their pytest for a rank.
    del os.environ[LAUNCH_VARIABLE]
    os.environ[INSIDE_VARIABLE] = "1"
    template = RankTemplate(session, extensions)
    template.become_rank(dataclasses.replace(launch, item_index=places[0]), rank)


def _read_launch() -> Launch:
    return Launch.load(Path(os.environ[LAUNCH_VARIABLE]).read_text(encoding="utf-8"))
