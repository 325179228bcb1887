"""Ranks as new processes, where forking is unsafe: slow, but independent of the parent.

They are started from a process of their own too, as forked ranks are: it survives the pytest
process, adopts what ranks leave, and is small, so that it can fork.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, RANK_VARIABLE, SPEC_VARIABLE
from pytest_fsdp_comm.options import join_paths
from pytest_fsdp_comm.ranks.rank.gpus import visible_gpus_variable
from pytest_fsdp_comm.ranks.start.fork_client import ForkServer
from pytest_fsdp_comm.ranks.start.fork_server import serve
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import FORK_SERVER
from pytest_fsdp_comm.text.codec import dump_tagged, from_json, to_json

if TYPE_CHECKING:
    import pytest

    from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What the process that starts ranks is given."""

    descriptor: int
    """Of its connection to the pytest process."""
    directory: Path
    """As for `serve`."""
    shared: Path | None
    """As for `serve`."""
    invoked_in: Path
    """Where pytest was started."""
    arguments: tuple[str, ...]
    """What pytest was started with, and what its ranks need besides."""


def spawn_server(
    config: pytest.Config, directory: Path, shared: Path | None, terminal: tuple[int, ...]
) -> ForkServer:
    """Starts the process that starts ranks, with the arguments of this one.

    Args:
        config: The session's.
        directory: As for `fork_server.serve`.
        shared: As for `fork_server.serve`.
        terminal: As `RankSetSpec.terminal`.
    """
    # By now a path may exist, which moves the root directory where it is a word of its own.
    arguments = join_paths(map(str, config.invocation_params.args))
    from_environment = join_paths(shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    if config.pluginmanager.has_plugin("xdist"):
        arguments += ["-n", "0"]
    if config.pluginmanager.has_plugin("randomly"):
        # Each rank would choose a seed of its own.
        arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]

    def start(_: socket.socket, theirs: socket.socket) -> int:
        program = _Program(
            descriptor=theirs.fileno(),
            directory=directory,
            shared=shared,
            invoked_in=config.invocation_params.dir,
            arguments=tuple(arguments),
        )
        process = subprocess.Popen(  # noqa: S603  # this module itself
            [sys.executable, "-m", __name__, json.dumps(to_json(program))],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTEST_ADDOPTS": shlex.join(from_environment)},
            pass_fds=(theirs.fileno(), *terminal),
            # Not a session of its own, whose ranks could not read the terminal.
            process_group=0,
        )
        # The server is waited for by its id; this object would warn that nobody has done so.
        process.returncode = 0
        return process.pid

    return ForkServer(start)


def main(text: str) -> NoReturn:
    """Starts ranks until the pytest process is gone.

    Args:
        text: The program, as JSON.
    """
    program = from_json(_Program, json.loads(text))
    connection = socket.socket(fileno=program.descriptor)
    connection.set_inheritable(False)

    def run_rank(spec: RankSetSpec, rank: int) -> NoReturn:
        _become_rank(program, spec, rank)

    serve(
        Channel(connection, FORK_SERVER),
        lambda: run_rank,
        program.directory,
        program.shared,
        preloaded=(),
    )


def _become_rank(program: _Program, spec: RankSetSpec, rank: int) -> NoReturn:
    """Replaces this process by a pytest process, whose half is in `rank.spawned`."""
    file = spec.directory / f"rank{rank}.json"
    file.write_text(dump_tagged(spec), encoding="utf-8")
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        log = os.open(spec.log_path(rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, descriptor)
        os.close(log)
    # A rank resolves its markers by what was launched, as the pytest process did.
    environment = {name: text for name, text in os.environ.items() if name != INSIDE_VARIABLE}
    environment |= {SPEC_VARIABLE: str(file), RANK_VARIABLE: str(rank)}
    if spec.gpus:
        # Here already: what made forking unsafe may be that collecting starts CUDA.
        environment[visible_gpus_variable(environment)] = ",".join(spec.gpus)
    os.chdir(program.invoked_in)
    os.execve(  # noqa: S606  # pytest itself
        sys.executable, [sys.executable, "-m", "pytest", *program.arguments], environment
    )


if __name__ == "__main__":
    main(sys.argv[1])
