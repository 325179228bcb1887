"""What recording adds to an FSDP2 step, beside a bare dispatch mode and torch's CommDebugMode.

    python benchmarks/recording_overhead.py [--layers 32] [--steps 15] [--backend fake|gloo]

On the fake group, one process: nothing is waited for, and all added time is the recorder's. On
gloo, two, whose recordings are compared with the flight recorder at the end of each step. It is
full from the second turn on, when reading it takes longest; in a test it is after 20 such steps.
The four ways take turns step by step; medians are compared, so that a busy moment of the machine
hits all of them alike.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm.recording.comm_mode import CommMode

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32


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
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--backend", choices=["fake", "gloo"], default="fake")
    options = parser.parse_args()
    if options.backend == "fake":
        measure(0, options, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (options, f"{folder}/store"), nprocs=2)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    """Measures on one rank; rank 0 prints.

    Args:
        rank: Its number.
        options: The command line.
        store: The file in which the ranks of gloo meet.
    """
    torch.set_num_threads(1)
    if options.backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Sequential(*(Block() for _ in range(options.layers)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    batch = torch.randn(1, 8, WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    ways: dict[str, Callable[[], Any]] = {
        "nothing": nullcontext,
        "a counting TorchDispatchMode": Counting,
        # As the fixture is, and as a class in place of CommDebugMode.
        "comm_mode": lambda: CommMode(trace_operations=False)(model),
        "comm_mode, operations traced": lambda: CommMode()(model),
        "CommDebugMode": CommDebugMode,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.steps + 2):
        for name, way in ways.items():
            # What one way leaves behind must not be collected while another is timed.
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            with way():
                step()
            if turn > 1:
                seconds[name].append(time.perf_counter() - started)
    dist.destroy_process_group()
    if rank:
        return
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain, counting = medians["nothing"], medians["a counting TorchDispatchMode"]
    added = {name: median - plain for name, median in medians.items()}
    print(f"{options.layers} layers, {options.steps} steps each, {options.backend}")
    print(
        f"{'under':32} {'ms/step':>8} {'added ms':>9} {'step x counting':>16} {'added x Debug':>14}"
    )
    for name, median in medians.items():
        print(
            f"{name:32} {1000 * median:8.1f} {1000 * added[name]:9.1f} {median / counting:16.2f} "
            f"{added[name] / added['CommDebugMode']:14.2f}"
        )


if __name__ == "__main__":
    main()
