"""What recording adds to a training step, beside torch's own ways to watch one.

    python benchmarks/recording_overhead.py [--workload fsdp|tp] [--backend fake|gloo]
                                            [--layers 8 32 126] [--turns 15]

Each case has processes of its own: one on the fake group of four, where nothing is waited for, or
two on gloo, where a recording is compared with torch's flight recorder at the end of each block. It
is full, so that reading it takes longest: 2,000 collectives, as after many steps. `--kept 200` is
more like a test, which has run a few.

All ways take one step in each turn, in an order that is drawn. Measured is the CPU time of the
thread that trains, backward included: neither waiting nor gloo's own threads count. Printed are
ratios to a step under nothing, for the step alone and with what is around it: entering, leaving
and, of ours, naming the events. "min" compares the shortest of all turns, "median" is that of the
ratios of each turn, "+-" half the range of their middle half. "nothing, again" shows how far two
measurements of the same thing lie apart. "after the first recording" compares bare steps after a
block with those before it in a process of its own, since the kernels of a recording stay.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import statistics
import tempfile
import time
import tracemalloc
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from figures import keep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm import CommMode

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32
# What `comm_mode` may take, as ratios and bytes; printed beside the figures, never enforced.
STEP_LIMIT, EVENT_LIMIT, IDLE_LIMIT = 1.2, 735, 1.1
FEW_LAYERS = 8
"""Of these, entering and leaving a block are a larger part."""


def block_limit(layers: int) -> float:
    """What a step with entry and exit may take, as a ratio."""
    return 1.5 if layers <= FEW_LAYERS else 1.35


# What is made once, such as caches, falls into these turns.
WARM_UP = 1
WORLD_SIZES = {"fake": 4, "gloo": 2}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The least that a recorder on a dispatch mode can do."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Starts at 0."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Counts and runs."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A pre-norm transformer block with attention of one head."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As usual."""
        y = self.norm1(x)
        attention = torch.softmax(self.q(y) @ self.k(y).transpose(-1, -2), -1) @ self.v(y)
        x = x + self.out(attention)
        return x + self.down(torch.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]  # torch's modules are untyped


def main() -> None:
    """Measures each case in processes of its own, whose rank 0 prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", nargs="+", choices=["fsdp", "tp"], default=["fsdp", "tp"])
    parser.add_argument("--backend", nargs="+", choices=[*WORLD_SIZES], default=[*WORLD_SIZES])
    parser.add_argument("--layers", nargs="+", type=int, help="default: 8 32 126; of tp: 8 32")
    parser.add_argument("--turns", type=int, help="default: fewer of more layers, from 30 to 5")
    parser.add_argument("--kept", type=int, default=2000, help="by torch's flight recorder")
    options = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(options.kept)
    os.environ["KINETO_LOG_LEVEL"] = "9"  # the profiler announces each block otherwise
    print(f"torch {torch.__version__}; its flight recorder keeps {options.kept} collectives")
    print(f"comm_mode may take {STEP_LIMIT} of nothing, 1.35 with entry and exit (8 layers: 1.5)")
    for workload in options.workload:
        for layers in options.layers or ((8, 32, 126) if workload == "fsdp" else (8, 32)):
            for backend in options.backend:
                turns = options.turns or max(5, min(30, 480 // layers))
                processes = 2 if backend == "gloo" else 1
                _spawned(_measure, processes, backend, workload, layers, turns)
                _spawned(_measure_idle, processes, backend, workload, layers, turns)
    _spawned(_measure_memory, 1, "fake")


def _spawned(function: Callable[..., None], processes: int, backend: str, *arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = (function, backend, f"{folder}/store", *arguments)
        spawn(_in_group, given, nprocs=processes)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _in_group(
    rank: int, function: Callable[..., None], backend: str, store: str, *arguments: Any
) -> None:
    torch.set_num_threads(1)
    meeting = {"store": FakeStore()} if backend == "fake" else {"init_method": f"file://{store}"}
    dist.init_process_group(backend, rank=rank, world_size=WORLD_SIZES[backend], **meeting)
    function(backend, *arguments)
    dist.destroy_process_group()


def _model(backend: str, workload: str, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZES[backend],), mesh_dim_names=(workload,))
    model = nn.Sequential(*(Block() for _ in range(layers)))
    columns, rows = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), RowwiseParallel()
    for block in model:
        if workload == "fsdp":
            fully_shard(block, mesh=mesh)
        else:  # each rank has a head of its own
            parallelize_module(block, mesh, {**columns, "out": rows, "down": rows})
    if workload == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def _ways(model: nn.Module) -> dict[str, Callable[[], Any]]:
    ways: dict[str, Callable[[], Any]] = {
        "nothing": nullcontext,
        "nothing, again": nullcontext,
        "counting TorchDispatchMode": Counting,
        # As the fixture is, and as a class in place of CommDebugMode.
        "comm_mode": lambda: CommMode(trace_operations=False)(model),
        "comm_mode, operations traced": lambda: CommMode()(model),
        "CommDebugMode": CommDebugMode,
    }
    try:  # torch has it from 2.9 on
        ways["DebugMode"] = importlib.import_module("torch.utils._debug_mode").DebugMode
    except ModuleNotFoundError:
        print("DebugMode is missing from this torch")
    activities = [torch.profiler.ProfilerActivity.CPU]
    return ways | {"torch.profiler": lambda: torch.profiler.profile(activities=activities)}


def _measure(backend: str, workload: str, layers: int, turns: int) -> None:
    model, batch = _model(backend, workload, layers), torch.randn(1, 8, WIDTH)
    ways = _ways(model)
    names, count = [*ways], 0
    steps: dict[str, list[float]] = {name: [] for name in ways}
    blocks: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(int(os.environ["TORCH_FR_BUFFER_SIZE"]) if backend == "gloo" else 0):
        dist.all_reduce(torch.ones(1))
    warnings.simplefilter("ignore")  # the hooks of CommDebugMode cause some
    for turn in range(WARM_UP + turns):
        if turn == WARM_UP:
            gc.freeze()  # so that a collection takes no longer than a step
        # Drawn anew, since each way leaves the caches to the next; alike on all ranks.
        for name in random.Random(turn).sample(names, len(names)):  # noqa: S311  # no secret
            # What one way leaves behind must not be collected while another is measured.
            gc.collect()
            dist.barrier()
            way = ways[name]
            entered = time.thread_time()
            with way() as watch:
                started = time.thread_time()
                model(batch).sum().backward()
                model.zero_grad()
                ended = time.thread_time()
            if isinstance(watch, CommMode):
                count = len(watch.events)  # names them, if leaving did not
            left = time.thread_time()
            if turn >= WARM_UP:
                steps[name].append(ended - started)
                blocks[name].append(left - entered)
    if dist.get_rank() == 0:
        assert count, "nothing was recorded"
        print(f"\n{workload} of {layers} layers on {backend}: {count} collectives, {turns} turns")
        limits = STEP_LIMIT, block_limit(layers)
        _print_ratios(f"{workload} of {layers} layers on {backend}", steps, blocks, limits)


def _measure_idle(backend: str, workload: str, layers: int, turns: int) -> None:
    """Compare steps after the first recording, whose kernels stay, with those before it."""
    model, batch = _model(backend, workload, layers), torch.randn(1, 8, WIDTH)

    def run() -> float:
        gc.collect()
        dist.barrier()
        started = time.thread_time()
        model(batch).sum().backward()
        model.zero_grad()
        return time.thread_time() - started

    before = [run() for _ in range(WARM_UP + turns)][WARM_UP:]
    with CommMode(trace_operations=False)(model):
        run()
    after = [run() for _ in range(WARM_UP + turns)][WARM_UP:]
    if dist.get_rank() == 0:
        ratio = statistics.median(after) / statistics.median(before)
        keep(f"{workload} of {layers} layers on {backend}: idle kernels", [ratio], most=IDLE_LIMIT)
        lowest = min(after) / min(before)
        print(f"{'after the first recording':30}{lowest:6.2f}{ratio:8.2f}", flush=True)


def _print_ratios(
    case: str,
    steps: dict[str, list[float]],
    blocks: dict[str, list[float]],
    of_comm_mode: tuple[float, float],
) -> None:
    titles = "".join(f"{title:^24}" for title in ("step alone", "with entry and exit"))
    print(f"{'':30}{titles}{'CPU ms'}")
    print(f"{'':30}" + f"{'min':>6}{'median':>8}{'+-':>6}    " * 2 + f"{'step':>6}{'all':>8}")
    for name in [*steps][1:]:
        line = f"{name:30}"
        limits = of_comm_mode if name == "comm_mode" else (None, None)
        for what, seconds, most in zip(("step", "block"), (steps, blocks), limits, strict=True):
            under, bare = seconds[name], steps["nothing"]
            ratios = [mine / other for mine, other in zip(under, bare, strict=True)]
            keep(f"{case}: {name}, {what}", ratios, most=most)
            low, median, high = statistics.quantiles(ratios, n=4)
            line += f"{min(under) / min(bare):6.2f}{median:8.2f}{(high - low) / 2:6.2f}    "
        medians = (statistics.median(seconds[name]) for seconds in (steps, blocks))
        print(line + "".join(f"{1000 * median:8.1f}" for median in medians), flush=True)


def _measure_memory(backend: str) -> None:
    tensor = torch.ones(1)

    def kept(events: int) -> int:
        mode = CommMode(trace_operations=False)
        tracemalloc.start()
        with mode:
            for _ in range(events):
                dist.all_reduce(tensor)
        assert len(mode.events) == events
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    kept(10)  # what is made once
    print(f"\nmemory on {backend}: {kept(2000) / 2000:.0f} B an event, may be {EVENT_LIMIT}")


if __name__ == "__main__":
    main()
