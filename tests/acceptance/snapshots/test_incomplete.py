"""A recording that is known to be incomplete is neither compared nor written."""

import pytest

SOURCE = """
import threading

import pytest
import torch
import torch.distributed as dist

class Waiting:
    def __init__(self, work):
        self.go = threading.Event()
        self.thread = threading.Thread(target=self.run, args=[work], name="loader")
        self.thread.start()

    def run(self, work):
        self.go.wait()
        work()

    def __call__(self):
        self.go.set()
        self.thread.join()

@pytest.mark.distributed(world_size=2)
def test_it(comm_mode, comm_snapshot, dist_info):
    alone = [dist.new_group([rank], group_desc="alone") for rank in range(2)][dist_info.rank]
    # Sent below the dispatcher, so recordings lack it.
    backend = alone._get_backend(torch.device("cpu"))
    send = lambda: dist_info.rank == 0 or backend.allreduce([torch.ones(3)]).wait()
    waiting = Waiting(send)
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        pass  # here
    waiting()
    assert comm_mode == comm_snapshot
"""
FILE = "snapshots/test_it/test_it.ws2.comm"
MISSING = (
    "  1 collective sent on other threads, whose calls were not recorded: all_reduce of 12 B "
    "float32 over alone (on rank 1)"
)


class Project:
    def __init__(self, pytester):
        self.path = pytester.path
        self.pytester = pytester
        pytester.makepyfile(test_it=SOURCE)

    def edit(self, old, new):
        source = self.path / "test_it.py"
        text = source.read_text()
        assert old in text
        source.write_text(text.replace(old, new))

    def run(self, *arguments):
        return self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    def file(self):
        file = self.path / FILE
        return file.read_text() if file.exists() else None


@pytest.fixture
def project(pytester):
    return Project(pytester)


def said(result, *texts):
    output = result.stdout.str()
    for text in texts:
        assert text in output, output


def test_unseen_collective_fails_compare_and_update(project):
    project.run("--snapshot-update").assert_outcomes(passed=1)
    reviewed = project.file()
    project.edit("pass  # here", "waiting()")
    for arguments in ([], ["--snapshot-update"], ["--snapshot-update-new-only"]):
        result = project.run(*arguments)
        result.assert_outcomes(failed=1, warnings=1)
        said(
            result,
            "comm_mode could not record everything that was sent, so nothing was compared or "
            "written:",
            MISSING,
            "to compare the incomplete recording, use comm_snapshot(allow_unseen=True)",
            "UnseenCollectivesWarning: comm_mode: the recording is incomplete: 1 collective ",
        )
        assert "accept:" not in result.stdout.str()
        assert project.file() == reviewed


def test_what_was_not_seen_never_becomes_a_new_file(project):
    project.edit("pass  # here", "waiting()")
    result = project.run("--snapshot-update")
    result.assert_outcomes(failed=1, warnings=1)
    said(result, MISSING)
    assert project.file() is None


def test_what_was_not_seen_is_compared_if_allowed(project):
    project.edit("== comm_snapshot", "== comm_snapshot(allow_unseen=True)")
    project.edit("pass  # here", "waiting()")
    result = project.run("--snapshot-update")
    result.assert_outcomes(passed=1, warnings=1)
    said(result, "comm_mode: the recording is incomplete: 1 collective sent on")
    assert "outside (no-module) all_reduce[world] x1 of 8 B float32" in project.file()
    project.edit("torch.ones(2)", "torch.ones(4)")
    project.run().assert_outcomes(failed=1, warnings=1)


ROUTED = """
import pytest
import torch
import torch.distributed as dist
from torch import nn

class Routed(nn.Module):
    def forward(self, x):
        if x.sum().item() > 0:
            dist.all_reduce(x)
        return x

@pytest.mark.distributed(world_size=2, backend="fake")
def test_it(comm_mode, comm_snapshot):
    with comm_mode:
        Routed()(torch.ones(2))
    assert comm_mode == comm_snapshot
"""


def test_value_dependent_code_on_fake_group_fails(project):
    project.pytester.makepyfile(test_it=ROUTED)
    result = project.run("--snapshot-update")
    result.assert_outcomes(failed=1)
    said(
        result,
        "the fake group exchanges no values, so calls that depend on values may be recorded "
        "wrongly",
        "  test_it.py:8 reads the values of a tensor (item)",
        'run the test with backend="gloo"',
        "comm_snapshot(allow_value_dependent=True)",
    )
    assert project.file() is None
    project.edit("== comm_snapshot", "== comm_snapshot(allow_value_dependent=True)")
    project.run("--snapshot-update").assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)
    project.edit("== comm_snapshot(allow_value_dependent=True)", "== comm_snapshot")
    project.edit('backend="fake"', 'backend="gloo"')
    # On all ranks instead of one.
    project.run("--snapshot-update").assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)
