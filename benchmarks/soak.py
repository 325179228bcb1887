"""Check that a thousand distributed tests in one session leave nothing behind.

    python benchmarks/soak.py [--tests 1000] [--workers 2]

In one session, each test records a training step, and the first also compares it with a snapshot.
Every fifty tests, each pytest process measures memory, file descriptors and threads of itself and
of its fork server. The first tenth of the tests does not count, since they fill caches. Prints the
values after that tenth and at the end, the growth per test, and all problems: failed tests, growth
above a limit, and processes and files that were left behind. The exit status is 1 if there is a
problem.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# More than this is a leak: 20 MiB in 1,000 tests, or one file descriptor in a hundred tests.
MAX_KIB_A_TEST = 20.0
MAX_DESCRIPTORS_A_TEST = 0.01

SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=2, backend="gloo")
@pytest.mark.parametrize("number", range({tests}))
def test_step(number, device_mesh, comm_mode, comm_snapshot):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=device_mesh())
    with comm_mode(model):
        model(torch.ones(2, 8)).sum().backward()
    assert comm_mode.counts("all_gather") == 1
    snapshot = comm_snapshot(allow_unused=True)
    if number == 0:
        assert comm_mode == snapshot
"""

OBSERVER = """
import json, os, pathlib
import pytest

def children(pid):
    listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]

def measured(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "kib": int(values["VmRSS"].split()[0]),
        "threads": int(values["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }

class Observer:
    def __init__(self):
        self.count = 0

    def pytest_runtest_logfinish(self, nodeid):
        if "PYTEST_XDIST_WORKER" not in os.environ and os.environ.get("SOAK_WORKERS") != "0":
            return
        self.count += 1
        if self.count % 50 == 0:
            name = os.environ.get("PYTEST_XDIST_WORKER", "main")
            note = {"count": self.count, "pytest": measured(os.getpid())}
            for child in children(os.getpid()):
                note["fork server"] = measured(child)
            with open(os.environ["SOAK_NOTES"] + "." + name, "a") as file:
                print(json.dumps(note), file=file)

def pytest_configure(config):
    config.pluginmanager.register(Observer())
"""


def run(tests: int, workers: int, folder: Path) -> tuple[str, float]:
    """Run the session; return the last line that pytest printed, and the duration in seconds."""
    (folder / "test_soak.py").write_text(SOURCE.format(tests=tests))
    (folder / "conftest.py").write_text(OBSERVER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "SOAK_NOTES": str(folder / "notes"),
        "SOAK_WORKERS": str(workers),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
    (folder / "tmp").mkdir()
    # Write the snapshot in a separate session, so that its temporary files do not count.
    update = [*command, "--snapshot-update", "-k", "test_step[0]"]
    subprocess.run(update, cwd=folder, env=environment, check=True, capture_output=True)
    (folder / "tmp").rename(folder / "tmp-of-the-update")
    for notes in folder.glob("notes.*"):
        notes.unlink()
    (folder / "tmp").mkdir()
    started = time.perf_counter()
    done = subprocess.run(
        command + (["-n", str(workers)] if workers else []),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().splitlines()[-1], time.perf_counter() - started


def growth(folder: Path, tests: int) -> list[str]:
    """Print the growth of each process, and return a problem for each one that grew too much."""
    problems = []
    for path in sorted(folder.glob("notes.*")):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        # After a tenth of the tests, caches are full.
        settled = next(note for note in notes if note["count"] >= notes[-1]["count"] / 10)
        last = notes[-1]
        between = max(last["count"] - settled["count"], 1)
        for process in ("pytest", "fork server"):
            first, final = settled[process], last[process]
            per_test = {name: (final[name] - first[name]) / between for name in first}
            print(
                f"{path.suffix[1:]:8} {process:12} "
                f"memory {first['kib']} -> {final['kib']} KiB ({per_test['kib']:+.2f} a test), "
                f"descriptors {first['descriptors']} -> {final['descriptors']}, "
                f"threads {first['threads']} -> {final['threads']}"
            )
            if per_test["kib"] > MAX_KIB_A_TEST:
                problems.append(f"memory of the {process} grows")
            if per_test["descriptors"] > MAX_DESCRIPTORS_A_TEST or per_test["threads"] > 0:
                problems.append(f"descriptors or threads of the {process} grow")
    if not problems and not any(folder.glob("notes.*")):
        problems.append(f"nothing was measured in {tests} tests")
    return problems


def left_behind(folder: Path) -> list[str]:
    """Return problems: processes of the session that still run, and files in its TMPDIR."""
    # Processes of the session have the folder's path in TMPDIR.
    mark = str(folder).encode()
    processes = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if _has(path, mark) and path.parent.name != str(os.getpid())
    ]
    # pytest keeps the temporary folders of its last sessions, and torch its compiler cache.
    ignored = ("pytest-of-", "torchinductor_")
    files = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(ignored)]
    problems = [f"processes left behind: {', '.join(processes)}"] if processes else []
    return problems + ([f"files left behind: {', '.join(files)}"] if files else [])


def _has(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes()
    except OSError:
        return False


def main() -> int:
    """Run the session and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        summary, seconds = run(arguments.tests, arguments.workers, folder)
        print(f"{summary} ({seconds / arguments.tests:.3f} s a test)")
        problems = growth(folder, arguments.tests) + left_behind(folder)
    if f"{arguments.tests} passed" not in summary:
        problems.append(summary)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
