"""What ``fsdp-comm record`` adds to the step of a script that it records, and to all others.

    python benchmarks/recorded_script.py [--turns 5] [--layers 32]

A script of FSDP2 layers on 4 gloo ranks is run by ``torchrun``, alone and as ``record --go-on``, in
turn. Rank 0 takes the CPU seconds of each step. Printed are the medians over turns of two ratios to
the script alone: of the recorded step, and of the median of all later steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import keep

RANKS = 4
STEPS = 60
RECORD = ("pytest_fsdp_comm", "record", "--go-on")
RECORDED_LIMIT, OTHERS_LIMIT = 1.3, 1.01

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

layers, steps, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(layers)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
found = []
for _ in range(steps):
    started = time.thread_time()
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found.append(time.thread_time() - started)
if dist.get_rank() == 0:
    with open(out, "w") as file:
        json.dump(found, file)
dist.destroy_process_group()
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    recorded, others = [], []
    for _ in range(options.turns):
        alone, under = _steps(options.layers), _steps(options.layers, "-m", *RECORD)
        recorded.append(under[2] / statistics.median(alone[2:]))
        others.append(statistics.median(under[5:]) / statistics.median(alone[5:]))
    for name, ratios, most in (
        ("recorded step", recorded, RECORDED_LIMIT),
        ("all others", others, OTHERS_LIMIT),
    ):
        low, high = min(ratios), max(ratios)
        print(
            f"{name:14} {statistics.median(ratios):6.3f} ({low:.3f} to {high:.3f}), "
            f"may be {most} of the script alone"
        )
        keep(f"{RANKS} ranks, {options.layers} layers: {name}", ratios, most=most)


def _steps(layers: int, *how: str) -> list[float]:
    """CPU seconds of each step on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "train.py", Path(folder) / "seconds.json"
        script.write_text(SCRIPT, encoding="utf-8")
        launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone")
        done = subprocess.run(
            [sys.executable, *launcher, *how, str(script), str(layers), str(STEPS), str(out)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{how} failed:\n{done.stdout}\n{done.stderr}")
        if how and not (Path(folder) / "step.comm").exists():
            raise SystemExit("nothing was recorded")
        found: list[float] = json.loads(out.read_text(encoding="utf-8"))
        return found


if __name__ == "__main__":
    main()
