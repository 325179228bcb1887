"""Record, compare and update snapshots with real ranks and small models."""

import os
import re
import runpy
import shutil
import stat
from pathlib import Path

import pytest

SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 8

def make(mesh):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

@pytest.mark.distributed(world_size=2)
def test_step(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = make(device_mesh())
    with comm_mode(model):
        model(torch.randn(2, WIDTH)).sum().backward()
    assert comm_mode == comm_snapshot
    assert fsdp_tree(model) == comm_snapshot(name="tree")
"""
COMM = "snapshots/test_it/test_step.ws2.comm"
TREE = "snapshots/test_it/test_step.ws2.tree.comm"
# 64 float32 in each layer; the root has no parameters of its own.
TEXT = """\
world_size 2
mesh dp=2 stride 1
forward {0..1} all_gather[dp] x1 of 256 B float32 parameters
forward {0..1} reshard x1
forward {0..1} unshard x1
backward 0 all_gather[dp] x1 of 256 B float32 parameters ahead 1
backward {0..1} reduce_scatter[dp] x1 of 256 B float32 gradients
backward 1 all_gather[dp] x1 of 256 B float32 parameters
backward {0..1} reshard x1
backward {0..1} unshard x1
peak gathered 512 B
total all_gather[dp] x4 1_024 B
total reduce_scatter[dp] x2 512 B
end
"""


class Project:
    def __init__(self, pytester):
        self.pytester = pytester
        self.path = pytester.path
        pytester.makepyfile(test_it=SOURCE)

    def edit(self, old, new):
        file = self.path / "test_it.py"
        source = file.read_text()
        assert old in source
        file.write_text(source.replace(old, new))

    def append(self, source):
        with (self.path / "test_it.py").open("a") as file:
            file.write(source)

    def run(self, *arguments):
        return self.pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    def update(self, *arguments):
        return self.run("--snapshot-update", *arguments)

    def files(self):
        root = self.path / "snapshots"
        return sorted(
            str(file.relative_to(self.path)) for file in root.rglob("*") if file.is_file()
        )

    def read(self, name):
        return (self.path / name).read_text()


@pytest.fixture
def project(pytester):
    return Project(pytester)


@pytest.fixture(scope="module")
def snapshots(run_session):
    """Return the project after the first update."""
    session = run_session(SOURCE, "--snapshot-update")
    assert session.status == 0, session.output
    return session.path / "snapshots"


@pytest.fixture
def recorded(project, snapshots):
    shutil.copytree(snapshots, project.path / "snapshots")
    assert project.files() == [COMM, TREE]
    return project


def explained(result, *texts):
    shown = result.stdout.str()
    for text in texts:
        assert text in shown
    assert "Traceback" not in shown
    assert "INTERNALERROR" not in shown


def test_a_missing_snapshot_fails_until_it_is_recorded(project):
    result = project.run()
    result.assert_outcomes(failed=1)
    explained(
        result,
        f"there is no snapshot {COMM} yet",
        'record it: pytest --snapshot-update "test_it.py::test_step"',
    )
    assert project.files() == []

    result = project.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["2 snapshots generated."])
    header, _, body = project.read(COMM).partition("\n")
    assert header.startswith("# pytest-fsdp-comm 2 comm | torch ")
    assert header.endswith(", gloo (not compared)")
    assert body == TEXT

    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["2 snapshots passed."])


def test_an_update_without_a_change_touches_no_file(recorded):
    file = recorded.path / COMM
    # Other versions in the first line do not cause a write.
    file.write_text(file.read_text().replace("torch 2", "torch 1"))
    before = file.read_text()
    recorded.update().assert_outcomes(passed=1)
    assert file.read_text() == before


def test_the_fake_backend_compares_with_the_same_file(recorded):
    result = recorded.run("--comm-backend", "fake")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["2 snapshots passed."])


@pytest.mark.release
def test_snapshots_under_xdist_record_and_compare(project):
    pytest.importorskip("xdist")
    project.append("".join(
        f"\n@pytest.mark.distributed(world_size=2)\ndef test_more_{n}(device_mesh, comm_mode, "
        "comm_snapshot):\n    model = make(device_mesh())\n    with comm_mode(model):\n"
        "        model(torch.randn(2, WIDTH))\n    assert comm_mode == comm_snapshot\n"
        for n in range(4)
    ))  # fmt: skip
    project.update("-n", "2").assert_outcomes(passed=5)
    assert len(project.files()) == 6
    result = project.run("-n", "2")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["6 snapshots passed."])


def test_unused_snapshots_of_ranks_are_listed(recorded):
    recorded.edit('    assert fsdp_tree(model) == comm_snapshot(name="tree")', "")
    result = recorded.run("--snapshot-details")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    explained(
        result,
        "1 snapshot passed.",
        "1 snapshot file that no test compared, so the run fails:",
        "  snapshots/test_it/test_step.ws2.tree.comm",
        "To remove them: git rm snapshots/test_it/test_step.ws2.tree.comm",
    )


def test_syrupy_options_work_as_documented(recorded):
    """Pass options without an effect together; test_unused.py tests the others, too."""
    page = runpy.run_path(str(Path(__file__).parents[3] / "docs/settings_table.py"))
    values = {
        "--snapshot-default-extension": "=syrupy.extensions.json.JSONSnapshotExtension",
        "--snapshot-diff-mode": "=disabled",
        "--snapshot-ignore-file-extensions": "=comm",
        "--snapshot-dirname": "=other",
        "--snapshot-file-lock-timeout": "=0.001",
    }
    without_effect = [
        option + values.get(option, "")
        for option, effect in page["SYRUPY"].items()
        if effect.startswith(page["NO_EFFECT"])
    ]
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    stale = recorded.path / "snapshots/test_it/test_gone.ws2.comm"
    stale.write_text((recorded.path / COMM).read_text())
    said = []
    for arguments in ((), without_effect):
        shown = recorded.run("-vv", "--color=yes", "-Wignore", *arguments).stdout.str()
        kept = re.sub(r"(?m)^.*(accept: | in [\d.]+s|rootdir: |--basetemp).*$", "", shown)
        said.append(kept.partition("collected 1 item")[2])
    assert said[0] == said[1]
    assert "differs from" in said[0]
    assert "test_gone.ws2.comm" in said[0]

    details = recorded.update("--snapshot-details").stdout.str()
    assert f"({COMM})" in details
    recorded.update("--snapshot-details").stdout.no_fnmatch_line(f"*({COMM})")


def test_second_world_size_keeps_reviewed_file(recorded):
    recorded.edit("world_size=2", "world_size=[2, 3]")
    result = recorded.run()
    result.assert_outcomes(passed=1, failed=1)
    explained(result, "there is no snapshot snapshots/test_it/test_step.ws3.comm yet")
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    result = recorded.run()
    result.assert_outcomes(failed=2)
    explained(result, f"comm_mode differs from {COMM}")
    recorded.update().assert_outcomes(passed=2)
    assert recorded.files() == sorted(
        [COMM, TREE, COMM.replace("ws2", "ws3"), TREE.replace("ws2", "ws3")]
    )


PLAIN = """
import os
import pytest

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_plain(snapshot, n):
    {failing}
    assert n == snapshot

@pytest.mark.distributed(world_size=2)
def test_last(snapshot):
    assert "last" == snapshot
    assert "named" == snapshot(name="x")
"""


@pytest.fixture(scope="module")
def plain_snapshots(run_session):
    session = run_session(PLAIN.format(failing="pass"), "--snapshot-update")
    assert session.status == 0, session.output
    return session.path / "__snapshots__"


@pytest.fixture
def amber(pytester, plain_snapshots):
    """Return the snapshot file of a project with plain syrupy snapshots."""
    shutil.copytree(plain_snapshots, pytester.path / "__snapshots__")
    return pytester.path / "__snapshots__" / "test_it.ambr"


@pytest.mark.parametrize(
    ("failing", "arguments"),
    [
        ("assert n != 1", ("-x",)),
        pytest.param("assert n != 1", ("--maxfail=1", "-n", "2"), marks=pytest.mark.release),
        pytest.param("assert n != 1", (), marks=pytest.mark.release),
        ("if n == 1: pytest.skip()", ()),
        ("if n == 1: pytest.exit('enough')", ()),
        ("if n == 1: os._exit(3)", ("-n", "2")),
        ("pass", ("test_it.py::test_plain[2]",)),
    ],
)
def test_update_keeps_plain_snapshots_of_failed_test(pytester, amber, failing, arguments):
    before = amber.read_text()
    assert before.count("# name:") == 6
    pytester.makepyfile(test_it=PLAIN.format(failing=failing))
    result = pytester.runpytest_subprocess("--snapshot-update", *arguments)
    assert "deleted" not in result.stdout.str()
    assert amber.read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="serial"),
        pytest.param(("-n", "2"), id="xdist", marks=pytest.mark.release),
    ],
)
def test_update_removes_unused_plain_snapshots(pytester, amber, arguments):
    source = PLAIN.format(failing="pass").replace('    assert "named" == snapshot(name="x")\n', "")
    pytester.makepyfile(test_it=source)
    result = pytester.runpytest_subprocess("--snapshot-update", *arguments)
    result.stdout.fnmatch_lines(["*1 unused snapshot deleted.*"])
    assert amber.read_text().count("# name:") == 5


def test_a_part_never_replaces_the_whole(project):
    project.edit(
        ".sum().backward()",
        ".sum().backward()\n"
        "        import torch.distributed as dist\n"
        "        group = dist.new_group([1])\n"
        "        if dist.get_rank() == 1:\n"
        "            dist.all_reduce(torch.ones(4), group=group)",
    )
    project.update().assert_outcomes(passed=1)
    before = {name: project.read(name) for name in project.files()}
    # This rank's part is equal, so there is nothing to write.
    project.update("--comm-backend", "fake").assert_outcomes(passed=1)
    assert {name: project.read(name) for name in project.files()} == before
    project.edit("WIDTH = 8", "WIDTH = 16")
    result = project.update("--comm-backend", "fake")
    result.assert_outcomes(failed=1)
    explained(
        result,
        f"{COMM} was recorded on all ranks, but this run recorded only rank 0 of 2, so the update "
        "would lose ranks; nothing was overwritten. Update on the same ranks (gloo and nccl run "
        "all ranks, --comm-backend fake does not), or delete the file to record only these ranks",
    )
    project.edit("assert comm_mode == comm_snapshot", "assert True")
    result = project.update("--comm-backend", "fake", "--snapshot-no-cleanup")
    result.assert_outcomes(failed=1)
    explained(result, f"{TREE} was recorded on all ranks, but this run recorded only")
    assert {name: project.read(name) for name in project.files()} == before


def test_simulated_snapshot_is_updated_by_same_ranks(project):
    project.edit("world_size=2)", "world_size=8, backend='fake', ranks=(0, 5))")
    project.update().assert_outcomes(passed=1)
    project.edit("WIDTH = 8", "WIDTH = 16")
    project.run().assert_outcomes(failed=1)
    project.update().assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)


RANKS_DIFFER = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SENDER, FROZEN = 3, 0

@pytest.mark.distributed(world_size=4, backend="fake", ranks=(0, 3))
def test_ranks(dist_info, device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = fully_shard(nn.Linear(8, 8, bias=False), mesh=device_mesh())
    model.weight.requires_grad_(dist_info.rank != FROZEN)
    with comm_mode(model):
        model(torch.randn(2, 8))
        if dist_info.rank == SENDER:
            dist.send(torch.ones(2), (SENDER + 1) % 4)
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot
"""


def test_differing_simulated_ranks_have_own_lines(project):
    (project.path / "test_it.py").write_text(RANKS_DIFFER)
    project.update().assert_outcomes(passed=1)
    comm, tree = (
        project.read(f"snapshots/test_it/test_ranks.ws4.{name}") for name in ("comm", "tree.comm")
    )
    assert [line for line in comm.splitlines() if "ranks" in line] == [
        "ranks 0,3",
        "outside (no-module) send[dp] x1 of 8 B float32 peer +1 ranks 3",
        *(line for line in comm.splitlines() if line.startswith("total")),
    ]
    assert [line for line in tree.splitlines() if "ranks" in line] == ["ranks 0", "ranks 3"]
    project.run().assert_outcomes(passed=1)
    project.update().assert_outcomes(passed=1)
    project.edit("SENDER, FROZEN = 3, 0", "SENDER, FROZEN = 0, 3")
    result = project.run()
    result.assert_outcomes(failed=1)
    explained(
        result,
        "comm_mode and fsdp_tree differ from snapshots/test_it/test_ranks.ws4 (2 files)",
        "(no-module) outside forward and backward: send[dp] on rank 0: 0 -> 1 (+1), 0 -> 8 B per "
        "rank; on rank 3: 1 -> 0 (-1), 8 -> 0 B per rank",
    )
    project.update().assert_outcomes(passed=1)
    text = project.read("snapshots/test_it/test_ranks.ws4.comm")
    assert text == comm.replace("ranks 3", "ranks 0")


COUNTING = """
import pytest
from pytest_fsdp_comm.snapshots.lines import SnapshotLines

READ = []
make = SnapshotLines.__init__

def counting(self, text, *, where):
    READ.append(where)
    make(self, text, where=where)

SnapshotLines.__init__ = counting

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        report.sections.append(("parsed", "".join(f"parsed {where}\\n" for where in READ)))
    READ.clear()
    return report
"""


def test_a_failed_comparison_parses_each_text_once(recorded):
    recorded.pytester.makeconftest(COUNTING)
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    recorded.edit("    assert comm_mode == comm_snapshot\n    assert fsdp_tree(model)", "    tree")
    recorded.edit(
        'tree == comm_snapshot(name="tree")',
        'assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot',
    )
    result = recorded.run()
    result.assert_outcomes(failed=1)
    explained(result, "comm_mode and fsdp_tree differ from")
    parsed = [line for line in result.outlines if line.startswith("parsed ")]
    assert sorted(set(parsed)) == [f"parsed {COMM}", f"parsed {TREE}", "parsed the recording"]
    # One report for both ranks: rank 0's.
    assert parsed.count(f"parsed {COMM}") == 1
    assert parsed.count(f"parsed {TREE}") == 1
    assert parsed.count("parsed the recording") == 2


def test_update_refuses_two_recordings_for_one_file(project):
    once = "    assert comm_mode == comm_snapshot(name='step')\n"
    project.edit("    assert comm_mode == comm_snapshot\n", once + once)
    project.update().assert_outcomes(passed=1)
    again = "    with comm_mode(model):\n        model(torch.randn(2, WIDTH))\n"
    project.edit(once + once, once + again + once)
    result = project.update()
    result.assert_outcomes(failed=1)
    explained(
        result,
        "this test compares two different recordings with "
        "snapshots/test_it/test_step.ws2.step.comm, and an update cannot write both: give the "
        'second one a name, comm_snapshot(name="second")',
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory_keeps_old_snapshot(recorded):
    directory = (recorded.path / COMM).parent
    directory.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        before = recorded.read(COMM)
        recorded.edit(
            "fully_shard(layer, mesh=mesh)",
            "fully_shard(layer, mesh=mesh, reshard_after_forward=False)",
        )
        result = recorded.update()
        result.assert_outcomes(failed=1)
        explained(result, f"cannot write the snapshot {COMM} (Permission denied); an existing")
        assert recorded.read(COMM) == before
    finally:
        directory.chmod(stat.S_IRWXU)


def test_uncreatable_directory_fails_with_remedy(project):
    (project.path / "snapshots").write_text("a file where the directory should be")
    result = project.update()
    result.assert_outcomes(failed=1)
    explained(
        result,
        f"cannot write the snapshot {COMM} (",
        "Make the directory writable, or set another with the ini option fsdp_comm_snapshot_dir",
    )
    assert (project.path / "snapshots").is_file()


def test_recording_without_process_group_is_refused(pytester):
    pytester.makepyfile(
        test_plain="""
        def test_step(comm_mode, comm_snapshot):
            with comm_mode:
                pass
            assert comm_mode.get_total_counts() == 0
            assert comm_mode == comm_snapshot
        """
    )
    for arguments in ((), ("--snapshot-update",)):
        result = pytester.runpytest_subprocess(*arguments)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E * comm_mode recorded without a process group, *@pytest.mark.distributed(*"]
        )
    assert not (pytester.path / "snapshots").exists()


def test_empty_recording_is_refused(project):
    project.edit("model(torch.randn(2, WIDTH)).sum().backward()", "pass")
    for result in (project.run(), project.update()):
        result.assert_outcomes(failed=1)
        explained(
            result,
            "the recording has no collectives, so a snapshot of it would check nothing",
            "comm_snapshot(allow_empty=True)",
        )
    assert project.files() == []
    project.edit("comm_mode == comm_snapshot", "comm_mode == comm_snapshot(allow_empty=True)")
    project.update().assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)


def test_lost_collectives_of_a_snapshot_are_compared(project):
    project.edit("assert fsdp_tree", "assert True or fsdp_tree")
    project.update().assert_outcomes(passed=1)
    reviewed = project.read(COMM)
    project.edit("model(torch.randn(2, WIDTH)).sum().backward()", "pass")
    result = project.run()
    result.assert_outcomes(failed=1)
    explained(result, "their gradients are no longer reduced over dp", "breaks training: pytest")
    explained(project.update(), "the recording has no collectives")
    assert project.read(COMM) == reviewed


def test_unsharded_tree_is_refused(project):
    project.edit("fsdp_tree(model)", "fsdp_tree(nn.Linear(2, 2))")
    result = project.update()
    result.assert_outcomes(failed=1)
    explained(result, "the tree has no unit and no DTensor", "is fully_shard(model) or")


def test_ranks_that_differ_are_named_and_compared(project):
    project.edit("assert fsdp_tree", "assert True or fsdp_tree")
    project.edit(
        ".sum().backward()",
        ".sum().backward()\n"
        "        import torch.distributed as dist\n"
        "        group = dist.new_group([0])\n"
        "        if dist.get_rank() == 0:\n"
        "            dist.all_reduce(torch.ones(4), group=group)",
    )
    project.update().assert_outcomes(passed=1)
    line = "outside (no-module) all_reduce[size1] x1 of 16 B float32 ranks 0"
    assert line in project.read(COMM).splitlines()
    project.run().assert_outcomes(passed=1)
    # Only rank 0 runs on the fake group; its part of the file is compared.
    project.run("--comm-backend", "fake").assert_outcomes(passed=1)
    project.edit("dist.get_rank() == 0", "dist.get_rank() == 5")
    result = project.run()
    result.assert_outcomes(failed=1)
    explained(result, "no more collectives over size1")


def test_a_comparison_that_only_one_rank_makes_fails(project):
    project.edit(
        "    assert comm_mode ==",
        "    if device_mesh().get_rank() == 0:\n        assert comm_mode ==",
    )
    result = project.update("--comm-timeout", "30")
    result.assert_outcomes(failed=1)
    explained(result, "every rank must make the same comparisons in the same order")


def test_plain_syrupy_snapshots_work_in_ranks(project):
    project.append(
        "\n@pytest.mark.distributed(world_size=2)\ndef test_plain(snapshot):\n"
        "    assert {'a': 1} == snapshot\n    assert [2] == snapshot\n"
        "    assert 'named' == snapshot(name='x')\n"
    )
    result = project.update()
    result.assert_outcomes(passed=2)
    amber = project.path / "__snapshots__" / "test_it.ambr"
    assert amber.read_text().count("# name: test_plain") == 3
    result = project.run()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["5 snapshots passed."])
    project.edit("{'a': 1} == snapshot", "{'a': 2} == snapshot")
    project.run().assert_outcomes(passed=1, failed=1)


BLOCKS = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=2, backend="fake")
def test_loop(comm_mode, comm_snapshot):
    for _ in range(3):
        with comm_mode:
            dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot

@pytest.mark.distributed(world_size=2, backend="fake")
def test_each(comm_mode, comm_snapshot):
    for step in ("first", "second"):
        with comm_mode:
            dist.all_reduce(torch.ones(2))
        assert comm_mode == comm_snapshot(name=step)

@pytest.mark.distributed(world_size=2, backend="fake")
def test_asked(comm_mode, comm_snapshot):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode.counts("all_reduce") == 1
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot
"""


def test_uncompared_block_fails_despite_later_one(project):
    (project.path / "test_it.py").write_text(BLOCKS)
    result = project.update()
    result.assert_outcomes(passed=2, failed=1)
    explained(
        result,
        "comm_mode recorded 3 blocks, but a comparison covers only the last one",
        "comm_snapshot(name=...) stores each in a separate file",
    )
    assert sorted(Path(name).name for name in project.files()) == [
        "test_asked.ws2.comm",
        "test_each.ws2.first.comm",
        "test_each.ws2.second.comm",
    ]


PARTIAL = """
import pytest
import torch
import torch.distributed as dist

EXTRA = False

@pytest.mark.distributed(world_size=2)
def test_it(comm_mode, comm_snapshot):
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        if EXTRA:
            dist.barrier()
    assert comm_mode == comm_snapshot
"""


@pytest.mark.release
def test_accept_command_of_partial_run_works(project):
    (project.path / "test_it.py").write_text(PARTIAL)
    project.update().assert_outcomes(passed=1)
    project.edit("EXTRA = False", "EXTRA = True")
    result = project.run("--comm-backend", "fake")
    explained(result, 'accept: pytest --snapshot-update "test_it.py::test_it"')
    project.edit("world_size=2)", 'world_size=2, backend="fake")')
    result = project.run()
    explained(
        result,
        "accept: rm snapshots/test_it/test_it.ws2.comm && pytest --snapshot-update "
        '"test_it.py::test_it"',
    )


@pytest.mark.parametrize(
    "mark",
    [
        "xfail(strict=True)",
        *(
            pytest.param(mark, marks=pytest.mark.release)
            for mark in ("xfail", "xfail(raises=AssertionError)")
        ),
    ],
)
def test_xfail_of_comparison_is_xfailed(recorded, mark):
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    recorded.edit("@pytest.mark.distributed", f"@pytest.mark.{mark}\n@pytest.mark.distributed")
    result = recorded.run("-rx")
    result.assert_outcomes(xfailed=1)
    assert "went on" not in result.stdout.str()


HELPER = """
def check(value, snapshot):
    assert value == snapshot
"""


@pytest.mark.parametrize(
    "way",
    ["helper", *(pytest.param(way, marks=pytest.mark.release) for way in ("plain", "variable"))],
)
def test_unrewritten_assertion_is_explained(recorded, way):
    """For example, in a module that is neither a test module nor a conftest."""
    recorded.pytester.makepyfile(helper=HELPER)
    old = "    assert comm_mode == comm_snapshot\n"
    recorded.edit("import pytest\n", "import pytest\nimport helper\n")
    if way == "helper":
        recorded.edit(old, "    helper.check(comm_mode, comm_snapshot)\n")
    elif way == "variable":
        recorded.edit(old, "    is_same = comm_mode == comm_snapshot\n    assert is_same\n")
    arguments = ["--assert=plain"] if way == "plain" else []
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    result = recorded.run("--comm-artifacts=art", "--comm-summary=s.md", *arguments)
    result.stdout.fnmatch_lines(
        [
            f"*comm_mode differs from {COMM}",
            "*unit sizes changed: modules {0..1} 256 B -> 1.0 KiB per gather",
            "*accept: pytest --snapshot-update *test_it.py::test_step*",
            "FAILED test_it.py::test_step - unit sizes changed: *",
        ]
    )
    assert (recorded.path / "art" / "received").is_dir()
    assert "another reason" not in (recorded.path / "s.md").read_text()


@pytest.mark.parametrize(
    "after",
    [
        "is_same = comm_mode == comm_snapshot; assert 1 == 2",
        "is_same = comm_mode == comm_snapshot; assert False, 'mine'",
        "assert comm_mode == comm_snapshot; assert not comm_mode",
    ],
)
def test_other_failure_has_no_comparison_text(recorded, after):
    if "is_same" in after:
        recorded.edit("WIDTH = 8", "WIDTH = 16")
    recorded.edit("    assert comm_mode == comm_snapshot\n", f"    {after}\n")
    result = recorded.run()
    result.assert_outcomes(failed=1)
    assert "differs from" not in result.stdout.str()


@pytest.mark.release
def test_artifacts_that_cannot_be_kept_cost_no_story(recorded):
    recorded.edit("WIDTH = 8", "WIDTH = 16")
    (recorded.path / "art").mkdir()
    (recorded.path / "art" / "received").touch()
    result = recorded.run("--comm-artifacts=art")
    result.assert_outcomes(failed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*unit sizes changed: modules {0..1} 256 B -> 1.0 KiB per gather*",
            "*PytestWarning: --comm-artifacts: cannot write the recording (*Not a directory: "
            "'*art/received/test_it'), so `fsdp-comm accept` cannot accept it",
            "FAILED test_it.py::test_step - unit sizes changed: *",
        ],
        consecutive=False,
    )


def test_missing_snapshot_in_ci_prints_record_command(project):
    result = project.run("--comm-summary=s.md")
    result.assert_outcomes(failed=1)
    summary = (project.path / "s.md").read_text()
    assert "To record it:\n\n```text\npytest --snapshot-update" in summary
    assert "To accept it" not in summary


EVALUATED = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_step(device_mesh, comm_mode, comm_snapshot, is_evaluated):
    model, batch = fully_shard(nn.Linear(4, 4), mesh=device_mesh()), torch.ones(2, 4)
    if is_evaluated:
        with torch.no_grad():
            model(batch)
    with comm_mode(model):
        model(batch).sum().backward()
    assert comm_mode == comm_snapshot
"""


def test_update_warns_about_gathers_that_a_snapshot_lacks(run_session):
    """Later comparisons with this snapshot would pass."""
    session = run_session(EVALUATED, "--snapshot-update")
    assert session.status == 0, session.output
    missing = "the first all-gather is missing"
    assert f"PytestWarning: snapshots/test_it/test_step[True].ws2.comm: {missing}" in session.output
    assert session.output.count(missing) == 1
