"""Compare the CPU time of a training step under `comm_mode` and under torch's tools.

    python benchmarks/recording_overhead.py [--workload fsdp|tp] [--backend fake|gloo]
                                            [--layers 8 32 126] [--turns 15]

Each case runs in separate processes: one on the fake group with four ranks, where nothing waits, or
two on gloo. On gloo, the end of each block compares the recording with torch's flight recorder. The
benchmark first fills it with 2,000 collectives, as many as it holds after many steps. `--kept 200`
is closer to a test.

In each turn, one step runs under each tool, in random order. The measured time is the CPU time of
the training thread, which also runs backward; it contains neither waiting nor gloo's threads.
Prints ratios to a bare step: of the step alone, and of the step with entering and leaving the block
(for `comm_mode`, including the names of the events). "min" compares the shortest steps, "median" is
the median of the ratios of all turns, and "+-" is half of their interquartile range. "bare again"
shows the noise: it measures the bare step a second time. "after the first recording" compares bare
steps after a block with those before it, in another process, since the kernels of a recording stay
registered.
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
# Limits of `comm_mode`: bytes and a ratio, printed with the figures and not enforced.
EVENT_LIMIT, IDLE_LIMIT = 735, 1.1
FEW_LAYERS = 8
"""With at most this many layers, entering and leaving take a larger share of the step."""


def block_limit(layers: int) -> float:
    """Return the limit of the ratio that includes entering and leaving the block."""
    return 1.5 if layers <= FEW_LAYERS else 1.35


# Turns that fill caches and are not counted.
WARM_UP = 1
WORLD_SIZES = {"fake": 4, "gloo": 2}
# Printed, but not on docs/figures.md: they show the noise, and the least that a mode can take.
NOT_KEPT = ("bare again", "counting TorchDispatchMode")
# Tools for which entering and leaving the block takes no time.
STEP_ONLY = ("CommDebugMode", "DebugMode")


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Count collectives: the cheapest recorder that a dispatch mode can be."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A pre-norm transformer block with one attention head."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run attention and MLP."""
        y = self.norm1(x)
        attention = torch.softmax(self.q(y) @ self.k(y).transpose(-1, -2), -1) @ self.v(y)
        x = x + self.out(attention)
        return x + self.down(torch.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]  # torch's modules are untyped


def main() -> None:
    """Measure each case in separate processes, whose rank 0 prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", nargs="+", choices=["fsdp", "tp"], default=["fsdp", "tp"])
    parser.add_argument("--backend", nargs="+", choices=[*WORLD_SIZES], default=[*WORLD_SIZES])
    parser.add_argument("--layers", nargs="+", type=int, help="default: 8 32 126; for tp: 8 32")
    parser.add_argument("--turns", type=int, help="default: 480 / layers, between 5 and 30")
    parser.add_argument("--kept", type=int, default=2000, help="size of torch's flight recorder")
    options = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(options.kept)
    os.environ["KINETO_LOG_LEVEL"] = "9"  # otherwise, the profiler prints a line for each block
    print(f"torch {torch.__version__}; its flight recorder has {options.kept} entries")
    print("limits of comm_mode, with entering and leaving: 1.35 (8 layers: 1.5)")
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
        arguments = (function, backend, f"{folder}/store", *arguments)
        spawn(_in_group, arguments, nprocs=processes)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _in_group(
    rank: int, function: Callable[..., None], backend: str, store: str, *arguments: Any
) -> None:
    torch.set_num_threads(1)
    meeting = {"store": FakeStore()} if backend == "fake" else {"init_method": f"file://{store}"}
    dist.init_process_group(backend, rank=rank, world_size=WORLD_SIZES[backend], **meeting)
    function(backend, *arguments)
    dist.destroy_process_group()
    # Let gloo's threads free the last backward's collectives: a thread that frees one while Python
    # exits aborts the process (torch 2.13: c10d's AsyncWork owns a ThreadLocalState).
    time.sleep(0.5)


def _model(backend: str, workload: str, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZES[backend],), mesh_dim_names=(workload,))
    model = nn.Sequential(*(Block() for _ in range(layers)))
    columns, rows = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), RowwiseParallel()
    for block in model:
        if workload == "fsdp":
            fully_shard(block, mesh=mesh)
        else:  # each rank has one head
            parallelize_module(block, mesh, {**columns, "out": rows, "down": rows})
    if workload == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def _tools(model: nn.Module) -> dict[str, Callable[[], Any]]:
    tools: dict[str, Callable[[], Any]] = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "counting TorchDispatchMode": Counting,
        # The first is like the fixture, the second like the class that replaces CommDebugMode.
        "comm_mode": lambda: CommMode(trace_operations=False)(model),
        "comm_mode, operations traced": lambda: CommMode()(model),
        "CommDebugMode": CommDebugMode,
    }
    try:  # since torch 2.9
        tools["DebugMode"] = importlib.import_module("torch.utils._debug_mode").DebugMode
    except ModuleNotFoundError:
        print("DebugMode is missing from this torch")
    activities = [torch.profiler.ProfilerActivity.CPU]
    return tools | {"torch.profiler": lambda: torch.profiler.profile(activities=activities)}


def _measure(backend: str, workload: str, layers: int, turns: int) -> None:
    model, batch = _model(backend, workload, layers), torch.randn(1, 8, WIDTH)
    tools = _tools(model)
    names, count = [*tools], 0
    steps: dict[str, list[float]] = {name: [] for name in tools}
    blocks: dict[str, list[float]] = {name: [] for name in tools}
    for _ in range(int(os.environ["TORCH_FR_BUFFER_SIZE"]) if backend == "gloo" else 0):
        dist.all_reduce(torch.ones(1))
    warnings.simplefilter("ignore")  # from the hooks of CommDebugMode
    for turn in range(WARM_UP + turns):
        if turn == WARM_UP:
            gc.freeze()  # otherwise a collection takes longer than a step
        # In a new order in each turn, since one tool leaves caches for the next. All ranks use the
        # same order.
        for name in random.Random(turn).sample(names, len(names)):  # noqa: S311  # not for cryptography
            # Otherwise, the next tool's time would include collecting this one's garbage.
            gc.collect()
            dist.barrier()
            tool = tools[name]
            entered = time.thread_time()
            with tool() as mode:
                started = time.thread_time()
                model(batch).sum().backward()
                model.zero_grad()
                ended = time.thread_time()
            if isinstance(mode, CommMode):
                count = len(mode.events)  # names the events
            finished = time.thread_time()
            if turn >= WARM_UP:
                steps[name].append(ended - started)
                blocks[name].append(finished - entered)
    if dist.get_rank() == 0:
        assert count, "nothing was recorded"
        case = f"{workload}, {layers} layers, {backend}"
        print(f"\n{case}: {count} collectives, {turns} turns")
        _print_ratios(case, steps, blocks, block_limit(layers))


def _measure_idle(backend: str, workload: str, layers: int, turns: int) -> None:
    """Compare bare steps before and after the first recording, whose kernels stay."""
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
        keep(f"{workload}, {layers} layers, {backend}: idle kernels", [ratio], most=IDLE_LIMIT)
        lowest = min(after) / min(before)
        print(f"{'after the first recording':30}{lowest:6.2f}{ratio:8.2f}", flush=True)


def _print_ratios(
    case: str,
    steps: dict[str, list[float]],
    blocks: dict[str, list[float]],
    limit_of_block: float,
) -> None:
    titles = "".join(f"{title:^24}" for title in ("step alone", "with enter and leave"))
    print(f"{'':30}{titles}{'CPU ms'}")
    print(f"{'':30}" + f"{'min':>6}{'median':>8}{'+-':>6}    " * 2 + f"{'step':>6}{'all':>8}")
    for name in [*steps][1:]:
        line = f"{name:30}"
        for part, seconds in (("step", steps), ("block", blocks)):
            limit = limit_of_block if (name, part) == ("comm_mode", "block") else None
            under, bare = seconds[name], steps["bare"]
            ratios = [tool_s / bare_s for tool_s, bare_s in zip(under, bare, strict=True)]
            if name not in NOT_KEPT and (part == "step" or name not in STEP_ONLY):
                keep(f"{case}: {name}, {part}", ratios, most=limit)
            low, median, high = statistics.quantiles(ratios, n=4)
            line += f"{min(under) / min(bare):6.2f}{median:8.2f}{(high - low) / 2:6.2f}    "
        medians = (statistics.median(seconds[name]) for seconds in (steps, blocks))
        print(line + "".join(f"{1000 * median:8.1f}" for median in medians), flush=True)


def _measure_memory(backend: str) -> None:
    tensor = torch.ones(1)

    def traced_size(events: int) -> int:
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

    traced_size(10)  # fills caches
    nbytes = traced_size(2000) / 2000
    print(f"\nmemory on {backend}: {nbytes:.0f} B for each event, limit {EVENT_LIMIT}")


if __name__ == "__main__":
    main()
