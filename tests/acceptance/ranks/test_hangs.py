"""A hang is explained: who waits in which collective, and who never came to it.

All hangs run once, in sessions side by side, whose reports are read test by test.
"""

import re

import pytest
from torch_facts import HAS_FLIGHT_RECORDER, needs_flight_recorder

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SESSIONS = 3
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:randomly")

SOURCE = r"""
import ctypes
import os
import re
import signal
import threading
import time
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.distributed(world_size=4, timeout_s={timeout_s})

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def test_missing(dist_info):
    dist.barrier()
    dist.all_reduce(torch.ones(4))
    if dist_info.rank == 3:
        time.sleep(1000)
    dist.all_gather([torch.ones(4) for _ in range(4)], torch.ones(4))

def test_ended_early(dist_info):
    dist.all_reduce(torch.ones(4))
    if dist_info.rank != 2:
        dist.all_reduce(torch.ones(4))

@pytest.mark.distributed(world_size=4, timeout_s={compares_s})
def test_compares(dist_info, comm_mode):
    with comm_mode:
        dist.all_reduce(torch.ones(4))
    if dist_info.rank == 1:
        comm_mode.merged_profile()
    dist.all_reduce(torch.ones(4))
    comm_mode.merged_profile()

def test_different(dist_info):
    if dist_info.rank < 2:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)
        dist.broadcast(torch.ones(4), 0)

def test_in_a_model(dist_info, device_mesh):
    mesh = device_mesh(replicate=2, shard=2)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if dist_info.rank == 3:
        def late(*_):
            time.sleep(1000)
        model.layers[1].register_forward_pre_hook(late, prepend=True)
    model(torch.ones(2, 8)).sum().backward()

def test_unnamed(dist_info):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if dist_info.rank < 2:
        for group in groups if dist_info.rank else reversed(groups):
            dist.all_reduce(torch.ones(4), group=group)

def test_post_forward(dist_info, device_mesh):
    mesh = device_mesh(dp=4)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    loss = fully_shard(model, mesh=mesh)(torch.ones(2, 8)).sum()
    if dist_info.rank == 3:
        time.sleep(1000)
    loss.backward()

def test_new_group(dist_info):
    if dist_info.rank == 2:
        dist.new_group([0, 1, 2])
    elif dist_info.rank == 1:
        dist.all_reduce(torch.ones(4))

def test_stopped(dist_info):
    if dist_info.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

def test_lock(dist_info):
    lock = threading.Lock()
    lock.acquire()
    if dist_info.rank == 2:
        lock.acquire()
    dist.barrier()

def test_ctypes(dist_info):
    if dist_info.rank == 2:
        ctypes.CDLL(None).sleep(1000)
    dist.barrier()

def test_ctypes_gil(dist_info):
    ends, one = os.pipe(), ctypes.create_string_buffer(1)
    if dist_info.rank == 2:
        # A signal would end a sleep; a read goes on after it.
        ctypes.PyDLL(None).read(ends[0], one, 1)
    dist.barrier()

def test_background(dist_info):
    work = dist.all_reduce(torch.ones(4), async_op=True) if dist_info.rank != 3 else None
    if dist_info.rank >= 2:
        time.sleep(1000)
    work.wait()

def test_comparison(dist_info, fsdp_tree, comm_snapshot):
    if dist_info.rank == 3:
        time.sleep(1000)
    assert fsdp_tree(fully_shard(nn.Linear(8, 8))) == comm_snapshot

class Explaining(Exception):
    def __str__(self):
        time.sleep(1000)

def test_died(dist_info):
    if dist_info.rank == 3:
        os._exit(7)
    if dist_info.rank == 2:
        raise Explaining
    time.sleep(1000)

def test_child(dist_info):
    if dist_info.rank == 1:
        child = os.fork()
        os.waitpid(child, 0) if child else time.sleep(1000)
    dist.barrier()

def test_gil(dist_info):
    if dist_info.rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL
    dist.barrier()

def test_point_to_point(dist_info):
    if dist_info.rank == 1:
        dist.recv(torch.ones(1), 0)

def test_sizes(dist_info):
    dist.all_reduce(torch.ones(8 if dist_info.rank == 3 else 4))

def test_parted(dist_info, device_mesh, comm_mode):
    mesh = device_mesh(replicate=2, shard=2)
    model = Model()
    if dist_info.rank == 1:
        model.forward = lambda x: model.layers[1](x)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        model(torch.ones(2, 8)).sum().backward()

def test_failure_hides_its_consequences(dist_info):
    if dist_info.rank == 1:
        raise ValueError("early")
    dist.all_reduce(torch.ones(4))
"""


CONFTEST = """
import os
import time
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    started = time.monotonic()
    result = yield
    if "RANK" not in os.environ:
        with open("seconds", "a") as file:
            print(item.name, time.monotonic() - started, file=file)
    return result
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory, _warm_starter):
    """The failure of each test, with line numbers and seconds replaced by ``N``."""
    project = tmp_path_factory.mktemp("hangs")
    limit_s = extend_under_load(4)
    # With torch's flight recorder, it ends much earlier.
    compares_s = 1000 if HAS_FLIGHT_RECORDER else limit_s
    source = SOURCE.replace("{timeout_s}", str(limit_s)).replace("{compares_s}", str(compares_s))
    (project / "test_it.py").write_text(source)
    (project / "conftest.py").write_text(CONFTEST)
    (project / "pytest.ini").write_text("[pytest]\n")
    names = re.findall(r"^def (test_\w+)", SOURCE, re.MULTILINE)
    outputs = [project / f"{number}.txt" for number in range(SESSIONS)]
    sessions = []
    for number, path in enumerate(outputs):
        chosen = [f"test_it.py::{name}" for name in names[number::SESSIONS]]
        with pytest.MonkeyPatch.context() as patch, path.open("wb") as output:
            patch.chdir(project)
            patch.setenv("OMP_NUM_THREADS", "1")
            for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
                patch.delenv(name, raising=False)
            stream = output.fileno()
            sessions.append(_warm_starter.start([*QUIET, *chosen], stream, stream))
    for session in sessions:
        session.wait(timeout=extend_under_load(200))
    texts = {}
    for path in outputs:
        failures, _, _ = path.read_text().partition("= short test summary info =")
        parts = re.split(r"^_+ (test_\w+) _+$", failures, flags=re.MULTILINE)
        texts |= zip(parts[1::2], parts[2::2], strict=True)
    assert texts.keys() == {*names}, "\n".join(path.read_text() for path in outputs)
    seconds = dict(line.split() for line in (project / "seconds").read_text().splitlines())
    assert seconds.keys() == {*names}
    # The deadline, and a bounded time for the stacks and the end of every process.
    assert all(float(text) < 5 * limit_s for text in seconds.values()), seconds
    return {
        name.removeprefix("test_"): re.sub(r"(py:|torch's |within )[\w.]+", r"\1N", text)
        for name, text in texts.items()
    }


REPORTS = {
    "missing": """\
ranks 0-3 did not finish within N s; all ranks were stopped.
all wait for rank 3, which is at test_it.py:N in test_missing: time.sleep(1000)
ranks 0-2 wait in all_gather #3 of world (64 B) at test_it.py:N in test_missing
rank 3 never called it (its last call on world was all_reduce #2), and is at test_it.py:N in \
test_missing: time.sleep(1000)
""",
    "ended_early": """\
ranks 0-1, 3 waited for rank 2, which had already finished the test; all ranks were stopped.
all wait for rank 2, which has finished the test
ranks 0-1, 3 wait in all_reduce #2 of world (16 B) at test_it.py:N in test_ended_early
rank 2 never called it (its last call on world was all_reduce #1), and has finished the test
""",
    "compares": """\
ranks 0, 2-3 waited for rank 1, which had already reached a line that waits for all ranks; all \
ranks were stopped.
all wait for rank 1, which waits until all ranks reach test_it.py:N in test_compares: \
comm_mode.merged_profile()
ranks 0, 2-3 wait in all_reduce #2 of world (16 B) at test_it.py:N in test_compares
rank 1 never called it (its last call on world was all_reduce #1), and waits until all ranks reach \
test_it.py:N in test_compares: comm_mode.merged_profile()
""",
    "different": """\
ranks 0-3 did not finish within N s; all ranks were stopped.
ranks 0-1 wait in all_reduce #1 of world (16 B) at test_it.py:N in test_different
ranks 2-3 wait in broadcast #1 of world (16 B) at test_it.py:N in test_different
  the collectives differ: all ranks must call the same one as #1 of world
""",
    "in_a_model": """\
rank 2 waits in all_gather #2 of shard for layers.1 (288 B) at test_it.py:N in forward
rank 3 never called it (its last call on shard was all_gather #1), and is at test_it.py:N in late: \
time.sleep(1000)
""",
    "unnamed": """\
ranks 0-1 wait for each other
rank 0 waits in all_reduce #1 of size2.stride1 (ranks 0-1, torch's N) (16 B) at test_it.py:N in \
test_unnamed
rank 1 never called it
rank 1 waits in all_reduce #1 of size2.stride1 (ranks 0-1, torch's N) (16 B) at test_it.py:N in \
test_unnamed
rank 0 never called it
""",
    "post_forward": """\
rank 2 waits in all_gather #1 of dp.post_forward (ranks 2-3, torch's N) for layers.1 (288 B) at \
test_it.py:N in test_post_forward
rank 3 never called it, and is at test_it.py:N in test_post_forward: time.sleep(1000)
""",
    "new_group": """\
rank 1 waited for ranks 0, 3, which had already finished the test; all ranks were stopped.
rank 1 waits for ranks 0, 3, which have finished the test
  and for rank 2, which is at test_it.py:N in test_new_group: dist.new_group([0, 1, 2])
rank 1 waits in all_reduce #1 of world (16 B) at test_it.py:N in test_new_group
ranks 0, 3 never called it, and have finished the test
rank 2 never called it, and is at test_it.py:N in test_new_group: dist.new_group([0, 1, 2])
""",
    "stopped": """\
all wait for rank 1, which does not respond
ranks 0, 2-3 wait in barrier #1 of world (0 B) at test_it.py:N in test_stopped
ranks 0, 2-3 are at""",
    "lock": """\
all wait for rank 2, which is at test_it.py:N in test_lock: lock.acquire()
ranks 0-1, 3 wait in barrier #1 of world (0 B) at test_it.py:N in test_lock
rank 2 never called it, and is at test_it.py:N in test_lock: lock.acquire()
""",
    # A signal would end its sleep: it answers without one.
    "ctypes": """\
all wait for rank 2, which is at test_it.py:N in test_ctypes: ctypes.CDLL(None).sleep(1000)
ranks 0-1, 3 wait in barrier #1 of world (0 B) at test_it.py:N in test_ctypes
rank 2 never called it, and is at test_it.py:N in test_ctypes: ctypes.CDLL(None).sleep(1000)
""",
    "ctypes_gil": """\
all wait for rank 2, which holds the GIL at test_it.py:N in test_ctypes_gil: \
ctypes.PyDLL(None).read(ends[0], one, 1)
ranks 0-1, 3 wait in barrier #1 of world (0 B) at test_it.py:N in test_ctypes_gil
ranks 0-1, 3 are at""",
    "gil": """\
all wait for rank 1, which holds the GIL at test_it.py:N in test_gil: re.match(""",
    "background": """\
all wait for rank 3, which is at test_it.py:N in test_background: time.sleep(1000)
ranks 0-1 wait in all_reduce #1 of world (16 B) at test_it.py:N in test_background
rank 2 called it, and is at test_it.py:N in test_background: time.sleep(1000)
rank 3 never called it, and is at test_it.py:N in test_background: time.sleep(1000)
""",
    "comparison": """\
ranks 0-3 did not finish within N s; all ranks were stopped.
ranks 0-2 are at (innermost frame first):
    test_it.py:N in test_comparison: assert fsdp_tree(""",
    "died": """\
rank 3 exited with status 7 (os._exit, or a crash) during call
ranks 0-1 were still running when the test was stopped, at:
    test_it.py:N in test_died: time.sleep(1000)
rank 2 was stopped while formatting its failure report; its failure is at:
    test_it.py:N in test_died: raise Explaining
""",
    "parted": """\
ranks 0-3 did not finish within N s; all ranks were stopped.
ranks diverged at #1 of shard: called on rank 0 for layers.0, on rank 1 for layers.1
rank 0 waits in all_gather #3 of shard for layers.1 (288 B) at test_it.py:N in test_parted
""",
    "sizes": """\
rank 3 waits in all_reduce #1 of world (32 B) at test_it.py:N in test_sizes
  the sizes differ: all ranks must pass the same shape to #1 of world
ranks 0-2 finished it (all_reduce, 16 B), and have finished the test
""",
    "point_to_point": """\
rank 1 did not finish within N s; all ranks were stopped.
rank 1 is at (innermost frame first):
    test_it.py:N in test_point_to_point: dist.recv(torch.ones(1), 0)
    inside recv (""",
}


NEED_RECORDER = {"compares", "different", "in_a_model", "parted"}
WITH_RECORDER = [pytest.mark.upstream, needs_flight_recorder]


@pytest.mark.parametrize(
    "test",
    [pytest.param(test, marks=WITH_RECORDER if test in NEED_RECORDER else ()) for test in REPORTS],
)
def test_report_explains_each_hang(reports, test):
    assert REPORTS[test] in reports[test]


@pytest.mark.parametrize("test", ["in_a_model", "post_forward"])
def test_hang_in_a_model_starts_with_the_culprit(reports, test):
    assert re.search(
        r"^all wait for rank 3, which is at test_it.py:N in .*: time.sleep",
        reports[test],
        re.MULTILINE,
    )


@pytest.mark.upstream
def test_the_stacks_follow(reports):
    assert (
        "rank 3 is at (innermost frame first):\n"
        "    test_it.py:N in test_missing: time.sleep(1000)\n" in reports["missing"]
    )


def test_hang_does_not_blame_the_fork(reports):
    """A rank in a lock, a read or a call to wait for a child may wait for anything."""
    assert {"lock", "gil", "child"} <= reports.keys()
    assert not [name for name, text in reports.items() if "fork" in text or "--comm" in text]


def test_only_a_stopped_process_has_no_position(reports):
    assert [name for name, text in reports.items() if "unknown" in text] == ["stopped"]
    assert all(len(text.splitlines()) < 40 for text in reports.values())


def test_consequences_of_a_failure_are_not_explained(reports):
    text = reports["failure_hides_its_consequences"]
    assert "ValueError: early" in text
    assert "rank 1 failed first" in text
    assert " wait in " not in text
    assert " wait in " not in reports["died"]
