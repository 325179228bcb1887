"""A hang is explained: who waits in which collective, and who never came to it.

All hangs run in one session, whose report is read test by test.
"""

import re

import pytest

SOURCE = r"""
import re
import time
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.distributed(world_size=4, timeout_s=5)

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
        time.sleep(60)  # missing
    dist.all_gather([torch.ones(4) for _ in range(4)], torch.ones(4))

def test_ended_early(dist_info):
    dist.all_reduce(torch.ones(4))
    if dist_info.rank != 2:
        dist.all_reduce(torch.ones(4))

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
        model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(60), prepend=True)
    model(torch.ones(2, 8)).sum().backward()

def test_one_axis(dist_info, device_mesh):
    mesh = device_mesh()
    model = fully_shard(Model(), mesh=mesh)
    if dist_info.rank == 3:
        time.sleep(60)
    model(torch.ones(2, 8))

def test_unnamed(dist_info):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if dist_info.rank < 2:
        for group in groups if dist_info.rank else reversed(groups):
            dist.all_reduce(torch.ones(4), group=group)

def test_gil(dist_info):
    if dist_info.rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL
    dist.barrier()

def test_point_to_point(dist_info):
    if dist_info.rank == 1:
        dist.recv(torch.ones(1), 0)

def test_a_failure_says_nothing_of_its_echo(dist_info):
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
def reports(tmp_path_factory):
    """The failure of each test, with line numbers replaced by the line's comment or ``N``."""
    import os
    import subprocess
    import sys

    project = tmp_path_factory.mktemp("hangs")
    (project / "test_it.py").write_text(SOURCE)
    (project / "conftest.py").write_text(CONFTEST)
    (project / "pytest.ini").write_text("[pytest]\n")
    names = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"],
        cwd=project,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "9 failed" in done.stdout, done.stdout + done.stderr
    seconds = dict(line.split() for line in (project / "seconds").read_text().splitlines())
    assert len(seconds) == 9
    # The deadline, and a bounded time for the stacks and the end of every process.
    assert all(float(text) < 5 + 15 for text in seconds.values()), seconds
    parts = re.split(r"^_+ test_(\w+) _+$", done.stdout, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: re.sub(r"py:\d+", "py:N", text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (
            "missing",
            """\
ranks 0-3 did not finish within 5 s, and every rank was ended.
all wait for rank 3, at test_it.py:N in test_missing
ranks 0-2 wait in all_gather #3 of world (16 B) at test_it.py:N in test_missing
rank 3 never issued it (its last of world was all_reduce #2), and is at test_it.py:N in \
test_missing
""",
        ),
        (
            "ended_early",
            """\
ranks 0-1, 3 did not finish within 5 s, and every rank was ended.
all wait for rank 2, which has finished the test
ranks 0-1, 3 wait in all_reduce #2 of world (16 B) at test_it.py:N in test_ended_early
rank 2 never issued it (its last of world was all_reduce #1), and has finished the test
""",
        ),
        (
            "different",
            """\
ranks 0-3 did not finish within 5 s, and every rank was ended.
ranks 0-1 wait in all_reduce #1 of world (16 B) at test_it.py:N in test_different
ranks 2-3 wait in broadcast #1 of world (16 B) at test_it.py:N in test_different
  these differ: #1 of world must be the same collective on every rank
""",
        ),
        (
            "in_a_model",
            """\
rank 2 waits in all_gather #2 of shard for layers.1 (144 B) at test_it.py:N in forward
rank 3 never issued it (its last of shard was all_gather #1), and is at test_it.py:N in <lambda>
""",
        ),
        (
            "one_axis",
            """\
all wait for rank 3, at test_it.py:N in test_one_axis
ranks 0-2 wait in all_gather #1 of dp (144 B) at test_it.py:N in test_one_axis
rank 3 never issued it, and is at test_it.py:N in test_one_axis
""",
        ),
        ("unnamed", "rank 0 waits in all_reduce #1 of size2.stride1 (ranks 0-1), torch's group "),
        ("unnamed", "rank 1 waits in all_reduce #1 of size2.stride1 (ranks 0-1), torch's group "),
        ("in_a_model", "all wait for rank 3, at test_it.py:N in <lambda>\n"),
        (
            "gil",
            """\
all wait for rank 1, which holds the GIL at test_it.py:N in test_gil
ranks 0, 2-3 wait in barrier #1 of world (0 B) at test_it.py:N in test_gil
""",
        ),
        (
            "point_to_point",
            """\
rank 1 did not finish within 5 s, and every rank was ended.
rank 1 is at (innermost frame first):
    test_it.py:N in test_point_to_point
    inside recv (""",
        ),
    ],
)
def test_each_hang_is_explained_by_who_waits_where_and_for_whom(reports, test, expected):
    assert expected in reports[test]


def test_the_stacks_follow(reports):
    assert (
        "rank 3 is at (innermost frame first):\n    test_it.py:N in test_missing\n"
        in reports["missing"]
    )
    assert not [name for name, text in reports.items() if "unknown" in text], reports


def test_echoes_of_a_failure_are_not_explained(reports):
    text = reports["a_failure_says_nothing_of_its_echo"]
    assert "ValueError: early" in text
    assert "rank 1 failed first" in text
    assert " wait in " not in text
