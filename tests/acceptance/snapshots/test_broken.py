"""Snapshots that git, an editor or a disk has broken are refused and never overwritten."""

import os

import pytest

SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def make(mesh):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return fully_shard(model, mesh=mesh)

class TestStep:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.distributed(world_size=2, backend="fake", scope="module")
    def test_comm(self, case, device_mesh, comm_mode, comm_snapshot):
        model = make(device_mesh())
        with comm_mode(model):
            model(torch.randn(2, 8)).sum().backward()
        assert comm_mode == comm_snapshot

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.distributed(world_size=2, backend="fake", scope="module")
    def test_tree(self, case, device_mesh, fsdp_tree, comm_snapshot):
        assert fsdp_tree(make(device_mesh())) == comm_snapshot
"""


BROKEN = {
    "conflict": (
        lambda text: text.replace("world_size", "<<<<<<< HEAD\nworld_size"),
        "line 2: it reads '<<<<<<< HEAD', a merge conflict marker; expected one side of the",
    ),
    "fifo": (None, "line 1: it is not a regular file; expected a snapshot"),
}
FINE = {
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "plain": lambda text: text,
}


@pytest.fixture
def project(pytester):
    directory = pytester.mkdir("checks")
    cases = [*BROKEN, *FINE]
    (directory / "test_it.py").write_text(f"CASES = {cases}\n{SOURCE}")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--snapshot-update")
    result.assert_outcomes(passed=2 * len(cases))
    return pytester


def test_broken_snapshot_is_refused_not_overwritten(project):
    before = {}
    for kind in ("comm", "tree"):
        for case, change in {**{name: entry[0] for name, entry in BROKEN.items()}, **FINE}.items():
            file = project.path / f"snapshots/checks/test_it/TestStep.test_{kind}[{case}].ws2.comm"
            text = file.read_text()
            if change is None:
                file.unlink()
                os.mkfifo(file)
                continue
            before[file] = change(text).encode()
            file.write_bytes(before[file])
    for arguments in ((), ("--snapshot-update",), ("--snapshot-update-new-only",)):
        result = project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        result.assert_outcomes(failed=2 * len(BROKEN), passed=2 * len(FINE))
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        shown = result.stdout.str()
        for kind in ("comm", "tree"):
            for case, (_, complaint) in BROKEN.items():
                name = f"snapshots/checks/test_it/TestStep.test_{kind}[{case}].ws2.comm, line "
                told = [line for line in shown.splitlines() if name in line]
                assert any(complaint in line and "git checkout" in line for line in told), told
        assert "INTERNALERROR" not in shown
        assert "Nothing was overwritten" in shown
        assert {file: file.read_bytes() for file in before} == before
