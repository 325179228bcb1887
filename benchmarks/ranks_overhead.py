"""Measure the time of a trivial test on 4 gloo ranks, with this plugin and without it.

    python benchmarks/ranks_overhead.py [--tests 40]

Prints the seconds for each test, and their ratio to the bare minimum: fork 4 processes, create a
gloo group over a file store, call a barrier, exit. The plugin's time is the difference between a
long and a short session, divided by the additional tests, so that the start of pytest does not
count. torch's test cases need ``expecttest``. Also prints how much longer a session without
distributed tests takes with the plugin.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import keep

WORLD_SIZE = 4
IDLE_SESSIONS = 11
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")

FLOOR = """
import os, sys, tempfile, time
import torch, torch.distributed as dist
torch.set_num_threads(1)

def once():
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range({world_size}):
            pid = os.fork()
            if pid == 0:
                store = dist.FileStore(directory + "/store", {world_size})
                dist.init_process_group("gloo", store=store, rank=rank, world_size={world_size})
                dist.barrier()
                os._exit(0)
            children.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)

once()  # warms the caches
started = time.perf_counter()
for _ in range({tests}):
    once()
print((time.perf_counter() - started) / {tests})
"""

PLUGIN = """
import pytest
import torch.distributed as dist

@pytest.mark.distributed(world_size={world_size}, backend="gloo", scope="{scope}")
@pytest.mark.parametrize("number", range({tests}))
def test_trivial(number):
    dist.barrier()
"""

TEST_CASE = """
import torch.distributed as dist
from torch.testing._internal.common_distributed import {base}
from torch.testing._internal.common_utils import run_tests

class TestTrivial({base}):
    world_size = {world_size}
{body}
{methods}

if __name__ == "__main__":
    run_tests()
"""

MULTI_PROCESS = """
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def run_one(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size
        )
        dist.barrier()
        dist.destroy_process_group()
"""

CONTINUOUS = """
    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def run_one(self):
        dist.barrier()
"""

THREADED = """
    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def run_one(self):
        dist.barrier()
"""

# DeepSpeed's DistributedTest starts a pool of processes for each test.
POOL = """
import tempfile, time
import torch.distributed as dist
import torch.multiprocessing as mp

def run(rank, folder):
    store = dist.FileStore(folder + "/store", {world_size})
    dist.init_process_group("gloo", store=store, rank=rank, world_size={world_size})
    dist.barrier()
    dist.destroy_process_group()

def once():
    with tempfile.TemporaryDirectory() as folder:
        with mp.get_context("forkserver").Pool({world_size}) as pool:
            pool.starmap(run, [(rank, folder) for rank in range({world_size})])

if __name__ == "__main__":
    once()
    started = time.perf_counter()
    once()
    print(time.perf_counter() - started)
"""

PLAIN = """
def test_plain():
    pass
"""

TORCHRUN = """
import torch.distributed as dist

def test_trivial():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=40, help="tests in the longer session")
    tests = parser.parse_args().tests
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's test cases need a package: pip install expecttest")
    floor = _printed(FLOOR, tests=tests)
    rows = {"bare minimum (fork, file store, gloo, barrier)": floor}
    rows["plugin, fresh ranks for each test"] = _plugin(tests, "test")
    # Ten times as many tests, since each takes less time than the noise of two sessions.
    rows['plugin, scope="module"'] = _plugin(10 * tests, "module")
    rows["torch's MultiProcessTestCase"] = _test_case("MultiProcessTestCase", MULTI_PROCESS, 1, 2)
    rows["torch's MultiProcContinuousTest"] = _test_case(
        "MultiProcContinuousTest", CONTINUOUS, 10, 10 * tests
    )
    rows["torch's MultiThreadedTestCase"] = _test_case(
        "MultiThreadedTestCase", THREADED, 10, 10 * tests
    )
    rows["a pool for each test, as in DeepSpeed"] = _printed(POOL)
    rows["torchrun -m pytest for each test"] = _torchrun()
    fresh = rows["plugin, fresh ranks for each test"]
    print(f"{'':48} {'s/test':>8} {'x min':>8} {'x plugin':>9}")
    for name, seconds in rows.items():
        print(f"{name:48} {seconds:8.4f} {seconds / floor:8.2f} {seconds / fresh:9.3f}")
        keep(name, [seconds / floor])
    idle = _idle()
    keep("a session without distributed tests, additional ms", [1000 * idle])
    print(f"session without distributed tests: {1000 * idle:+.0f} ms with the plugin")


def _printed(source: str, **names: object) -> float:
    """Run a program, and return the seconds that it prints."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "program.py"
        file.write_text(source.format(world_size=WORLD_SIZE, **names))
        return float(_run([sys.executable, str(file)]))


def _plugin(tests: int, scope: str) -> float:
    # The difference of two sessions cancels the start of pytest and of the fork server.
    few = max(2, tests // 4)
    return (_session(tests, scope) - _session(few, scope)) / (tests - few)


def _session(tests: int, scope: str) -> float:
    source = PLUGIN.format(world_size=WORLD_SIZE, tests=tests, scope=scope)
    return _timed(source, [sys.executable, *PYTEST])


def _test_case(base: str, body: str, few: int, many: int) -> float:
    def session(tests: int) -> float:
        methods = "\n".join(
            f"    def test_{number}(self):\n        self.run_one()\n" for number in range(tests)
        )
        text = TEST_CASE.format(base=base, world_size=WORLD_SIZE, body=body, methods=methods)
        return _timed(text, [sys.executable])

    return (session(many) - session(few)) / (many - few)


def _torchrun() -> float:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}"]
    return _timed(TORCHRUN, [*command, *PYTEST])


def _idle() -> float:
    command = [sys.executable, *PYTEST]
    # Alternate, so that a slow phase of the machine affects both.
    without, with_plugin = [], []
    for _ in range(IDLE_SESSIONS):
        without.append(_timed(PLAIN, [*command, "-p", "no:fsdp_comm"]))
        with_plugin.append(_timed(PLAIN, command))
    return statistics.median(with_plugin) - statistics.median(without)


def _timed(source: str, command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "test_trivial.py"
        file.write_text(source)
        started = time.perf_counter()
        _run([*command, str(file)], cwd=directory)
        return time.perf_counter() - started


def _run(command: list[str], cwd: str | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # With this variable, each session would compile the plugin again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
