"""Measure CPU time and memory of simulated training steps, with and without a recording.

    python benchmarks/simulation.py [--cases 8b hsdp ...] [--turns 3]

Simulates one rank of a published model, with tensors that have no memory. Each step runs in a
separate process, alternately with and without a recording. The CPU time starts before the model is
built and ends after the step; imports do not count. Memory is the peak of the process. Prints
medians and ranges of all turns; "adds" is the share of CPU time that recording adds. The exponents
describe how CPU time grows with ranks and with layers, from the first to the last case of a series.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import resource
import statistics
import sys
import time
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from figures import keep
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.simulation.world import simulate_rank

sys.path.append(str(Path(__file__).parents[1] / "examples"))
layouts = importlib.import_module("layouts")

# Configuration, mesh, layers (0 means all), and limits in CPU seconds and MiB.
CASES: dict[str, tuple[str, dict[str, int], int, float, float]] = {
    "8b": ("LLAMA_3_8B", {"dp": 8192}, 0, 6, math.inf),
    "hsdp 8 layers": ("LLAMA_3_8B", {"replicate": 128, "shard": 64}, 8, 6, math.inf),
    "hsdp": ("LLAMA_3_8B", {"replicate": 128, "shard": 64}, 0, 6, math.inf),
    "70b": ("LLAMA_3_70B", {"dp": 1024, "tp": 8}, 0, 13, 550),
    "405b": ("LLAMA_3_405B", {"dp": 16384}, 0, 22, 400),
}
SERIES = {
    "ranks": [(size, {"dp": size}, 8) for size in (8, 64, 512, 4096, 16384)],
    "layers": [(layers, {"dp": 8192}, layers) for layers in (8, 16, 32)],
}
ADDED_LIMIT = 0.2
EXPONENT_LIMITS = {"ranks": 0.05, "layers": 1}


def main() -> None:
    """Measure the cases, then the series."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"torch {torch.__version__}; limit of the time that recording adds: {ADDED_LIMIT}")
    titles = ("CPU s", "range", "limit", "bare", "adds", "MiB", "limit")
    widths = (8, 14, 8, 8, 8, 8, 8)
    columns = (f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    print(f"{'':16}{''.join(columns)}")
    for name in options.cases:
        config, mesh, layers, limit_s, limit_mib = CASES[name]
        _show(name, _measured(config, mesh, layers, options.turns), limit_s, limit_mib)
    for name, series in SERIES.items():
        seconds = []
        for size, mesh, layers in series:
            turns = _measured("LLAMA_3_8B", mesh, layers, options.turns)
            _show(f"{size} {name}", turns, math.inf, math.inf)
            seconds.append(statistics.median(turn[1][0] for turn in turns))
        exponent = math.log(seconds[-1] / seconds[0]) / math.log(series[-1][0] / series[0][0])
        print(f"exponent over {name}: {exponent:.2f}, limit {EXPONENT_LIMITS[name]}")
        keep(f"growth of CPU time: exponent over {name}", [exponent], most=EXPONENT_LIMITS[name])


_Turn = tuple[tuple[float, float], tuple[float, float]]
"""CPU seconds and MiB of the bare step, then of the recorded step."""


def _measured(config: str, mesh: dict[str, int], layers: int, turns: int) -> list[_Turn]:
    return [
        (_spawned(config, mesh, layers, False), _spawned(config, mesh, layers, True))  # noqa: FBT003  # as multiprocessing passes them
        for _ in range(turns)
    ]


def _spawned(*case: Any) -> tuple[float, float]:
    # Not forked, because the peak memory of a fork includes that of this process.
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_run, args=(sender, *case))
    process.start()
    measured: tuple[float, float] = receiver.recv()
    process.join()
    return measured


def _run(pipe: Any, config: str, mesh: dict[str, int], layers: int, is_recorded: bool) -> None:
    torch.set_num_threads(1)
    configuration = copy(getattr(layouts, config))
    configuration.num_hidden_layers = layers or configuration.num_hidden_layers
    # Import this before the time starts, since it takes seconds.
    importlib.import_module("transformers.models.llama.modeling_llama")
    dist.init_process_group("fake", rank=0, world_size=math.prod(mesh.values()), store=FakeStore())
    started = time.process_time()
    with simulate_rank(assumes=True):
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        model = layouts.build(configuration, device_mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        mode = CommMode(trace_operations=False)
        with mode(model) if is_recorded else contextlib.nullcontext():
            layouts.train_step(model, optimizer)
        assert not is_recorded or mode.events, "nothing was recorded"
    seconds = time.process_time() - started
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def _show(name: str, turns: list[_Turn], limit_s: float, limit_mib: float) -> None:
    bare, recorded = zip(*turns, strict=True)
    seconds = [turn[0] for turn in recorded]
    ratios = [with_mode[0] / alone[0] for alone, with_mode in turns]
    added = statistics.median(ratios) - 1
    if name in CASES:
        keep(f"{name}: recorded / bare", ratios, most=1 + ADDED_LIMIT)
        keep(f"{name}: CPU seconds", seconds, most=limit_s)
        keep(f"{name}: MiB", [turn[1] for turn in recorded], most=limit_mib)
    mib = max(turn[1] for turn in recorded)
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    print(
        f"{name:16}{statistics.median(seconds):8.1f}{spread:>14}{limit_s:8.0f}"
        f"{statistics.median(turn[0] for turn in bare):8.1f}{added:8.2f}{mib:8.0f}{limit_mib:8.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
