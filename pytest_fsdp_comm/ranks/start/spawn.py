"""Ranks as fresh pytest processes, where forking is unsafe: slow, but independent of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, RANK_VARIABLE, SPEC_VARIABLE
from pytest_fsdp_comm.ranks.rank.gpus import visible_gpus_variable
from pytest_fsdp_comm.ranks.start.ending import PATIENCE_S, descendants, kill, kill_groups
from pytest_fsdp_comm.ranks.start.slots import HeldSlots

if TYPE_CHECKING:
    import pytest

    from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec


class SpawnedRanks:
    """One spawned rank set, seen from the pytest process; `rank.spawned` is the other half."""

    def __init__(self, config: pytest.Config, spec: RankSetSpec) -> None:
        """Starts a pytest process for each rank, with the arguments of this one."""
        spec_file = spec.directory / "rank_set.json"
        spec_file.write_text(spec.dump(), encoding="utf-8")
        arguments = [str(argument) for argument in config.invocation_params.args]
        if config.pluginmanager.has_plugin("xdist"):
            arguments += ["-n", "0"]
        if config.pluginmanager.has_plugin("randomly"):
            # Each rank would choose a seed of its own.
            arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
        self._held = HeldSlots(spec.slots)
        # A rank resolves its markers by what was launched, as this process did.
        inherited = {name: text for name, text in os.environ.items() if name != INSIDE_VARIABLE}
        environment = {**inherited, SPEC_VARIABLE: str(spec_file)}
        if spec.gpus:
            # Here already: what made forking unsafe may be that collecting starts CUDA.
            environment[visible_gpus_variable(environment)] = ",".join(spec.gpus)
        self._processes = {}
        for rank in spec.ranks:
            with (
                spec.log_path(rank, "stdout").open("ab") as stdout,
                spec.log_path(rank, "stderr").open("ab") as stderr,
            ):
                self._processes[rank] = subprocess.Popen(  # noqa: S603  # pytest itself
                    [sys.executable, "-m", "pytest", *arguments],
                    cwd=config.invocation_params.dir,
                    env={**environment, RANK_VARIABLE: str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=spec.terminal,
                    # Not a session of its own, which could not read the terminal.
                    process_group=0,
                )

    def fileno(self) -> None:
        """None: there is no such descriptor, and the supervisor polls."""

    def exit_statuses(self) -> dict[int, int]:
        """The ranks that ended, with exit status or minus signal number."""
        polled = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: status for rank, status in polled.items() if status is not None}

    def pid(self, rank: int) -> int:
        """The process that a rank is, or was."""
        return self._processes[rank].pid

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank, if it still lives."""
        self._processes[rank].send_signal(number)

    def rest(self) -> None:
        """Ends them: spawned ranks run one test."""
        self.end(PATIENCE_S)

    def resume(self) -> bool:
        """Always false: they have ended."""
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
                # Or else it would warn later that nobody has waited for the process.
                process.returncode = -signal.SIGKILL
        self._held.release()
        return alive
