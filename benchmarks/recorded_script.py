"""Measure how much ``fsdp-comm record`` slows down the recorded step of a script, and other steps.

    python benchmarks/recorded_script.py [--turns 10] [--layers 32] [--widths 256 1024]

Runs a script with FSDP2 layers on 4 gloo ranks, alternately bare and under ``record --go-on``. The
ranks are forks of a process that has imported torch. Rank 0 measures the CPU seconds of each step.
Prints medians of all turns: the recorded step relative to a bare one, later steps relative to bare
ones, and the milliseconds that recording adds once: before the recorded step, where it searches for
the model, and in the recorded step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import runpy
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import torch.distributed  # here, before the ranks are forked
import torch.distributed.fsdp  # noqa: F401  # as above
from figures import keep

RANKS = 4
STEPS = 16
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
RECORD = ("record", "--go-on")
RECORDED_LIMIT = 1.3
# Later steps should take as long as bare ones, whose quartiles are 5 % apart.
LATER_LIMIT = 1.05

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

layers, width, steps = map(int, sys.argv[1:4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
seconds = []
for _ in range(steps):
    started = time.thread_time()
    model(torch.ones(64, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.thread_time() - started)
if dist.get_rank() == 0:
    with open(sys.argv[4], "w") as file:
        json.dump(seconds, file)
dist.destroy_process_group()
"""


def main() -> None:
    """Measure a script for each width, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 1024])
    options = parser.parse_args()
    # Otherwise malloc maps memory for each gathered parameter, which takes most of the CPU time.
    for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(name, 2**30)
    for width in options.widths:
        _measure(options.layers, width, options.turns)


def _measure(layers: int, width: int, turns: int) -> None:
    recorded, later, before_ms, added_ms, usual_ms = [], [], [], [], []
    for _ in range(turns):
        bare, under = _steps(layers, width), _steps(layers, width, *RECORD)
        # under[1] includes the search for the model, and under[2] is recorded.
        usual = statistics.median(bare[2:])
        recorded.append(under[2] / usual)
        later.append(statistics.median(under[5:]) / statistics.median(bare[5:]))
        usual_ms.append(1e3 * usual)
        before_ms.append(1e3 * (under[1] - bare[1]))
        added_ms.append(1e3 * (under[2] - usual))
    model = f"{layers} layers of {width} x {width}"
    print(f"{model}, {RANKS} ranks, a step of {statistics.median(usual_ms):.0f} CPU ms on a rank")
    for name, ratios, limit in (
        ("recorded step", recorded, RECORDED_LIMIT),
        ("later steps", later, LATER_LIMIT),
    ):
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"  {name:14} {median:6.3f} (quartiles {low:.3f} to {high:.3f}), limit {limit}")
        keep(f"{RANKS} ranks, {model}: {name}", ratios, most=limit)
    print(
        f"  added once: {statistics.median(before_ms):.0f} ms before the recorded step, "
        f"{statistics.median(added_ms):.0f} ms in it"
    )


def _steps(layers: int, width: int, *command: str) -> list[float]:
    """Return the CPU seconds of each step on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "train.py", Path(folder) / "seconds.json"
        script.write_text(SCRIPT, encoding="utf-8")
        # A free port for the ranks to meet.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [*command, str(script), *map(str, (layers, width, STEPS)), str(out)]
        pids = [_fork(folder, rank, port, arguments) for rank in range(RANKS)]
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            raise SystemExit(f"{arguments} failed:\n{(Path(folder) / 'output').read_text()}")
        if command and not (Path(folder) / "step.comm").exists():
            raise SystemExit("nothing was recorded")
        seconds: list[float] = json.loads(out.read_text(encoding="utf-8"))
        return seconds


def _fork(folder: str, rank: int, port: int, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with contextlib.suppress(SystemExit):
            if arguments[0] == RECORD[0]:
                sys.argv = ["fsdp-comm", *arguments]
                runpy.run_module("pytest_fsdp_comm", run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
