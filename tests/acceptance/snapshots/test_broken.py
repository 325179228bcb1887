"""Snapshots that git, an editor or a disk has broken: refused alike in either kind, and kept."""

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
        "line 2: it reads '<<<<<<< HEAD', a marker of a merge conflict; expected one side of the",
    ),
    "fifo": (None, "line 1: it is not a regular file; expected a regular file"),
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


def test_either_kind_is_refused_when_broken_and_never_overwritten(project):
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


RANKS = """
import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=4, backend="fake", ranks=(0, 3))
def test_ranks(dist_info, device_mesh, fsdp_tree, comm_snapshot):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist_info.rank == 3:
        fully_shard(model[0], mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())
    assert "rank 0 and rank 3 shard" in fsdp_tree.of_all_ranks(model).findings[0].reason
    assert fsdp_tree(model) == comm_snapshot
"""


def test_trees_of_chosen_ranks_have_the_ranks_own_numbers_and_are_checked(pytester):
    pytester.makepyfile(test_it=RANKS)
    run = pytester.runpytest_subprocess
    run("-p", "no:cacheprovider", "--snapshot-update").assert_outcomes(passed=1)
    run("-p", "no:cacheprovider").assert_outcomes(passed=1)
    file = pytester.path / "snapshots/test_it/test_ranks.ws4.comm"
    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith("ranks")] == [
        "ranks 0",
        "ranks 3",
    ]

    file.write_text(text.replace("  unit 0 fsdp2", "  unit 1 fsdp2"))
    result = run("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*fsdp_tree differs from snapshots/test_it/test_ranks.ws4.comm", "E*accept: pytest *"]
    )
    assert "it reads" not in result.stdout.str()

    broken = text.replace("ranks 3\n", "ranks 0\n")
    file.write_text(broken)
    result = run("-p", "no:cacheprovider", "--snapshot-update")
    result.assert_outcomes(failed=1)
    assert "line 2: it reads 'ranks 0'; expected 'world_size 4'" in result.stdout.str()
    assert file.read_text() == broken
