"""Tests of ``fsdp-comm diff`` on files and directories, and of the driver in ``git diff``."""

import dataclasses
from pathlib import Path

import pytest
import sample_profiles
from sample_files import TREE, recording

from pytest_fsdp_comm.comm.json import dump_recordings
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.snapshots.comm_text import format_profile

OLD, NEW = (format_profile(sample_profiles.profile(layers=layers)) for layers in (3, 4))
EXPLANATION = [
    "  layers: 3 -> 4 modules, the new ones like their siblings",
    "  cost: +30 % bytes in all (100.0 -> 130.0 KiB per rank)",
    "  cost: all_gather[dp] +31 % (65.0 -> 85.0 KiB), reduce_scatter[dp] +29 % (35.0 -> 45.0 KiB)",
]


def test_diff_explains_like_a_failed_test(write, fsdp_comm):
    write("old.comm", OLD)
    write("new.comm", NEW)
    result = fsdp_comm("diff", "old.comm", "new.comm")
    assert result.status == 1
    assert result.lines[0] == "old.comm -> new.comm:"
    assert result.lines[1:] == EXPLANATION
    assert not any("accept" in line for line in result.lines)
    lines = fsdp_comm("diff", "old.comm", "new.comm", "--lines").lines
    assert lines[: len(result.lines)] == result.lines
    assert "--- a/old.comm" in lines
    assert any(line.startswith("+forward layers.{0..3} all_gather[dp]") for line in lines)


def test_diff_without_compared_changes_exits_with_0(write, fsdp_comm):
    write("old.comm", OLD)
    write("crlf.comm", OLD.replace("\n", "\r\n").encode())
    write("torch.comm", OLD.replace("| torch ,", "| torch 9.9,"))
    for same in ("old.comm", "crlf.comm"):
        result = fsdp_comm("diff", "old.comm", same)
        assert (result.status, result.out) == (0, "")
    result = fsdp_comm("diff", "old.comm", "torch.comm")
    assert result.status == 0
    assert result.lines == [
        "old.comm -> torch.comm: only its first line differs, which is not compared"
    ]


def test_diff_compares_a_recording_with_a_snapshot(write, fsdp_comm):
    write("one.json", dump_recordings([recording(1)]))
    write("more.json", dump_recordings([recording(1, calls=3)]))
    result = fsdp_comm("diff", "one.json", "more.json")
    assert result.status == 1
    # A recording has call sites, a snapshot has none.
    assert any(line.endswith("called from train.py:3") for line in result.lines), result.out


def test_diff_of_another_world_size_leaves_no_rank_out(write, fsdp_comm):
    write("old.comm", OLD.replace("world_size 8", "world_size 8\nranks 0-1"))
    write("new.comm", NEW.replace("world_size 8", "world_size 16"))
    result = fsdp_comm("diff", "old.comm", "new.comm")
    assert result.status == 1
    assert "compares only" not in result.err
    assert any("recorded ranks: 0-1 -> all" in line for line in result.lines), result.out


@pytest.mark.parametrize("is_tree", [False, True])
def test_diff_with_all_ranks_compares_those_of_the_old(write, fsdp_comm, is_tree):
    old, new = (TREE, TREE.replace("[8] dp", "[8] frozen dp")) if is_tree else (OLD, NEW)
    size = "world_size 4" if is_tree else "world_size 8"
    write("old.comm", old.replace(size, f"{size}\nranks 0-1"))
    write("new.comm", new)
    result = fsdp_comm("diff", "old.comm", "new.comm")
    assert result.status == 1
    note = "compares only ranks 0-1 of new.comm, because old.comm has no other rank"
    assert note in result.err
    write("both.comm", new.replace(size, f"{size}\nranks 0-1"))
    assert fsdp_comm("diff", "old.comm", "both.comm").out.splitlines()[1:] == result.lines[1:]
    for pair in (("both.comm", "both.comm"), ("new.comm", "old.comm")):
        assert "compares only" not in fsdp_comm("diff", *pair).err


def test_diff_of_different_kinds_is_an_error(write, fsdp_comm):
    write("a.comm", OLD)
    write("b.comm", TREE)
    result = fsdp_comm("diff", "a.comm", "b.comm")
    assert result.status == 2
    assert "a.comm is a comm snapshot and b.comm is a tree snapshot" in result.err


EXAMPLES = Path(__file__).parents[3] / "snapshots/examples/test_llama"
EXAMPLE = EXAMPLES / "test_train_step[untied].ws4.comm"
RESHARD_ROWS = """\
forward model.layers.{0..3} reshard x1
backward model.layers.{0..3} all_gather[dp] x1 of 147_968 B float32 parameters ahead 1
backward model.layers.{0..3} unshard x1
"""


def test_diff_explains_communication_by_the_tree(write, fsdp_comm):
    comm, tree = EXAMPLE.read_text(), EXAMPLE.with_suffix(".tree.comm").read_text()
    unsharded = "".join(line for line in comm.splitlines(keepends=True) if line not in RESHARD_ROWS)
    unsharded = unsharded.replace("x9 1_446_144 B", "x5 854_272 B").replace("558_336", "854_272")
    likely = "  likely: reshard_after_forward "
    for side, sent in (("old", comm), ("new", unsharded)):
        write(f"{side}/test_x.ws4.comm", sent)
    assert f"{likely}became False" in fsdp_comm("diff", "old", "new").out
    for side, policy in (("old", "true"), ("new", "false")):
        text = tree.replace("reshard_after_forward=true", f"reshard_after_forward={policy}")
        write(f"{side}/test_x.ws4.tree.comm", text)
    assert f"{likely}True -> False, as the tree shows\n" in fsdp_comm("diff", "old", "new").out


def test_diff_of_two_files_compares_their_trees_once(write, fsdp_comm):
    for side, text in (
        ("old", TREE),
        ("new", TREE.replace("float32[8] dp", "float32[8] frozen dp")),
    ):
        write(f"{side}.comm", OLD)
        write(f"{side}.tree.comm", text)
    heading = "old.tree.comm -> new.tree.comm:"
    assert fsdp_comm("diff", "old.comm", "new.comm").lines.count(heading) == 1
    assert fsdp_comm("diff", "old.tree.comm", "new.tree.comm").lines.count(heading) == 1


def test_diff_compares_directories_file_by_file(write, fsdp_comm):
    frozen = TREE.replace("float32[8] dp", "float32[8] frozen dp")
    for side, tree in (("old", TREE), ("new", frozen)):
        write(f"{side}/test_a/test_x.ws4.tree.comm", tree)
    write("old/gone.ws8.comm", OLD)
    write("new/here.ws8.comm", OLD)
    result = fsdp_comm("diff", "old", "new/")
    assert result.status == 1
    summary = "  8 ranks; 7 all_gather[dp], 65.0 KiB; 4 reduce_scatter[dp], 35.0 KiB"
    assert result.lines[:2] == ["gone.ws8.comm: removed", summary]
    assert result.lines[3:5] == ["here.ws8.comm: added", summary]
    assert result.lines[6] == "test_a/test_x.ws4.tree.comm:"
    assert "b.weight" in result.lines[7]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["a.comm", "d"],
            "d is a directory and a.comm is not; expected two files or two directories",
        ),
        (["d", "d"], "neither d nor d contains a snapshot (*.comm)"),
        (["gone.comm", "a.comm"], "there is no file gone.comm"),
    ],
)
def test_diff_refuses_incomparable_files(write, fsdp_comm, arguments, problem):
    write("a.comm", OLD)
    write("d/x", "")
    result = fsdp_comm("diff", *arguments)
    assert (result.status, result.out) == (2, "")
    assert problem in result.err


DRIVER = {
    "diff.fsdp-comm.command": (
        'f() { fsdp-comm git-diff "$@" 2>/dev/null'
        ' || diff -u --label "a/$1" --label "b/$1" "$2" "$5" || :; }; f'
    ),
    "diff.fsdp-comm.textconv": 'f() { fsdp-comm show "$1" 2>/dev/null || cat "$1"; }; f',
}


@pytest.mark.costly
def test_git_diff_explains_and_stays_a_patch(write, git, project):
    page = (Path(__file__).parents[3] / "docs/command-line.md").read_text()
    for name, value in DRIVER.items():
        # The configuration on the page, apart from line breaks.
        assert f"git config {name} '{value}'" in " ".join(page.replace("\\\n", "").split()), name
        git("config", name, value)
    write(".gitattributes", "*.comm text eol=lf diff=fsdp-comm\n")
    write("a.ws8.comm", OLD)
    write("odd name.ws8.comm", OLD)
    write("gone.ws4.comm", TREE)
    git("add", ".")
    git("commit", "-qm", "one")
    write("a.ws8.comm", NEW)
    (project / "gone.ws4.comm").unlink()
    write("here.ws8.comm", NEW)
    git("add", "-AN")
    git("mv", "odd name.ws8.comm", "plain.ws8.comm")
    output = git("diff", "HEAD")
    assert output.splitlines()[0] == "a.ws8.comm:"
    assert "\n  cost: +" in output
    assert "here.ws8.comm: added" in output
    assert "gone.ws4.comm: removed" in output
    assert "odd name.ws8.comm -> plain.ws8.comm: renamed, otherwise unchanged" in output
    # git can apply the output as a patch.
    (project / "p.patch").write_text(output)
    git("apply", "-R", "--check", "p.patch")
    # For git's textconv, which passes one side at a time.
    assert "communication of 8 ranks" in git("diff", "--no-ext-diff", "HEAD", "--", "a.ws8.comm")
    # Lines of a file that is not a snapshot are printed without an explanation.
    write("a.ws8.comm", "<<<<<<< ours\n")
    broken = git("diff", "HEAD", "--", "a.ws8.comm")
    assert "no explanation: a.ws8.comm, line 1: it reads '<<<<<<< ours'" in broken
    assert "+<<<<<<< ours" in broken
    write("a.ws8.comm", OLD)
    git("commit", "-qm", "two", "-a")
    assert "here.ws8.comm: added" in git("diff", "HEAD~1..HEAD", "--", "here.ws8.comm")
    log = ("log", "-p", "-1", "--", "here.ws8.comm")
    assert "here.ws8.comm: added" in git("log", "--ext-diff", *log[1:])
    assert "+communication of 8 ranks" in git(*log)
    # If the program is missing, git prints plain lines.
    (project / "bin/fsdp-comm").unlink()
    write("a.ws8.comm", NEW)
    plain = git("diff")
    assert "+forward layers.{0..3}" in plain
    assert "\n  cost: +" not in plain
    assert "communication of" not in git(*log)


def test_git_diff_reports_an_unmerged_file(fsdp_comm):
    result = fsdp_comm("git-diff", "a.ws8.comm")
    assert result.lines == ["a.ws8.comm: unmerged; resolve the conflict, or check out one side"]


def test_diff_of_a_broken_file_keeps_other_diffs(write, fsdp_comm):
    write("a/x.ws8.comm", OLD)
    write("b/x.ws8.comm", NEW)
    write("a/y.ws8.comm", OLD)
    write("b/y.ws8.comm", NEW.replace("total all_gather", "total broadcast"))
    result = fsdp_comm("diff", "a", "b")
    assert result.status == 2
    assert result.lines == ["x.ws8.comm:", *EXPLANATION]
    assert result.err.startswith("fsdp-comm: b/y.ws8.comm, line ")


def ranks_in_order(*owners):
    """Two ranks that gather units of equal size; the second rank in another order."""
    return [
        dataclasses.replace(
            recording(0),
            rank=rank,
            world_size=2,
            mesh_axes=(MeshAxis(name="dp", size=2, dims=((2, 1),)),),
            collectives=tuple(
                dataclasses.replace(
                    recording(1).collectives[0], axis="dp", group_size=2, owner=owner, source="fsdp"
                )
                for owner in ordered
            ),
        )
        for rank, ordered in enumerate(owners)
    ]


def test_diff_and_show_name_diverging_ranks_first(write, fsdp_comm):
    line = "ranks diverge at call #1 over dp: rank 0 gathers a, rank 1 gathers b"
    write("same.json", dump_recordings(ranks_in_order("ab", "ab")))
    write("other.json", dump_recordings(ranks_in_order("ab", "ba")))
    result = fsdp_comm("diff", "same.json", "other.json")
    assert (result.status, result.lines[0]) == (1, f"other.json: {line}")
    result = fsdp_comm("diff", "other.json", "other.json")
    assert (result.status, result.lines) == (1, [f"other.json: {line}"])
    assert fsdp_comm("diff", "same.json", "same.json").status == 0
    result = fsdp_comm("show", "other.json")
    assert (result.status, result.lines[0]) == (0, line)
    assert "diverge" not in fsdp_comm("show", "same.json").out
