"""Both kinds of snapshots refuse the same mistakes, at a bounded cost."""

import os
import re

import pytest
from texts import parse_comm, parse_tree, parse_trees

from pytest_fsdp_comm import options
from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots import lines, tree_text
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.documents import read_snapshot
from pytest_fsdp_comm.tree.profile import merge

COMM = """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
world_size 8
mesh dp=4 stride 2
mesh tp=2 stride 1
forward layers.{0..3} all_gather[dp] x1 of 1_024 B float32
forward layers.{0..3} all_reduce[tp] x1 of 8 B int64
forward norm all_gather[dp] x1 of 8 B int64 ranks 0,2-3
forward layers.{0..3} unshard x1
forward norm redistribute (Shard(dim=1))->(Replicate()) x1
total all_gather[dp] x35 32_792 B, sum of 8 ranks
total all_reduce[tp] x32 256 B, sum of 8 ranks
end
"""
TREE = """\
# pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
world_size 8
mesh dp=4 stride 2
mesh tp=2 stride 1
unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true
parameter layers.{0..3}.weight float32[64,64] dp=Shard(0) tp=Replicate()
total 4 units, 4 parameters
end
"""
READERS = {"comm": (COMM, parse_comm), "tree": (TREE, parse_trees)}


def refused(kind, text):
    with pytest.raises(SnapshotFormatError) as caught:
        READERS[kind][1](text, where="a/b.comm")
    return str(caught.value)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("world_size", "<<<<<<< HEAD\nworld_size", "line 2: it reads '<<<<<<< HEAD', a merge"),
        ("mesh dp", "||||||| base\nmesh dp", "line 3: it reads '||||||| base', a merge con"),
        ("end\n", "=======\nend\n", "it reads '=======', a merge conflict marker"),
        ("end\n", "end\n>>>>>>> b\n", "it reads '>>>>>>> b', a merge"),
        ("layers", "la\0yers", "line 5: it reads"),
        ("world_size", "\rworld_size", "line 2: it reads '\\rworld_size 8'; expected"),
        ("# pytest", "\ufeff# pytest", "line 1: it reads '\\ufeff# pytest-fsdp-comm 2"),
        ("world_size 8", "world_size \uff18", "line 2: it reads 'world_size \uff18'; expected"),
        ("world_size 8", "world_size 08", "line 2: it reads 'world_size 08'; expected"),
        ("world_size 8", "world_size 131073", "with a number from 1 to 131072"),
        ("mesh tp=2 stride 1", "mesh dp=4 stride 2", "; expected"),
        ("dp=4", "dp=0", "line 3: it reads 'mesh dp=0 stride 2'; expected something like '<axis>"),
        ("dp=4", "dp=9", "stride <stride>', with sizes up to 8"),
        ("dp=4 stride 2", "dp=4 stride 02", "expected 'mesh dp=4 stride 2'"),
        ("dp=4 stride 2", "dp=2x2 stride 2", "expected a line in the format of"),
        ("dp=4 stride 2", "dp=4 ranks 0-9", "bad ranks '0-9'; expected ranks from 0 to 7 in asc"),
        ("dp=4 stride 2", "dp=4 ranks", "it reads 'mesh dp=4 ranks': bad ranks ''; expected ranks"),
        ("mesh dp=4 stride 2", "mesh", "line 3: it reads 'mesh'; expected"),
        ("mesh dp", "ranks 0,9\nmesh dp", "line 3: it reads 'ranks 0,9': bad ranks '0,9'; expec"),
        ("mesh dp", "ranks 0-7\nmesh dp", "it reads 'ranks 0-7'; expected 'mesh dp=4"),
        ("{0..3}", "{0..9999999}", "too many names"),
        ("{0..3}", "{0..900000}.{0..900000}", "expands to too many names; expected at most"),
        ("{0..3}", "{0..03}", "bad numbers {0..03} in 'layers.{0..03}"),
        ("{0..3}", "{3}", "bad numbers {3} in 'layers.{3}"),
        ("layers", "l\\x61yers", "line 5: it reads"),
        ("end\n", "end", "the file ends with 'end'; expected 'end' as the last line"),
        ("# pytest-fsdp-comm 2 ", "# pytest-fsdp-comm 9 ", "line 1: the snapshot has format 9; "),
        ("-comm 2 ", "-comm 2 zzz", "-comm <version> comm' or '... tree'"),
    ],
)  # fmt: skip
def test_recordings_and_trees_refuse_the_same_mistakes(kind, old, new, complaint):
    text = READERS[kind][0]
    assert old in text
    message = refused(kind, text.replace(old, new))
    assert complaint in message
    assert message.startswith("a/b.comm, line ")
    assert "git checkout" in message


def test_a_conflict_says_how_to_take_a_side():
    assert refused("tree", TREE.replace("mesh", "=======\nmesh")) == (
        "a/b.comm, line 3: it reads '=======', a merge conflict marker; expected one side of the "
        "conflict. Nothing was overwritten: choose a side with `git checkout --ours a/b.comm` or "
        "`git checkout --theirs a/b.comm` (if the markers are already committed, restore the file "
        "from an earlier commit: `git checkout COMMIT -- a/b.comm`), then run the test; if it "
        "fails and the change is intended, add --snapshot-update"
    )


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("x1 of 1_024", "x\uff11 of 1_024", "line 5: it reads"),
        ("x1 of 1_024", "x0 of 1_024", "line 5: it reads"),
        ("1_024", "10_24", "x1 of 10_24 B float32'; expected"),
        ("1_024", "9" * 5000, "line 5: it reads"),
        ("forward norm all", "sideward norm all", "with one of the phases forward, backward,"),
        ("ranks 0,2-3", "ranks 3-2", "bad ranks '3-2'; expected ranks from 0 to 7 in ascending"),
        ("ranks 0,2-3", "ranks 2,3", "bad ranks '2,3'; expected '2-3'"),
        ("ranks 0,2-3", "ranks 0,2,4,6", "bad ranks '0,2,4,6'; expected '0-6/2'"),
        ("ranks 0,2-3", "ranks 0-4/2", "bad ranks '0-4/2'; expected '0,2,4'"),
        ("ranks 0,2-3", "ranks 0-7/2", "bad ranks '0-7/2'; expected ranks from 0 to 7 in asc"),
        ("ranks 0,2-3", "ranks 0-99999999999", "bad ranks '0-99999999999'"),
        ("ranks 0,2-3", "ranks 0-7", "B int64 ranks 0-7'; expected 'forward norm all"),
        ("norm all_gather[dp] x1 of 8 B int64 ranks 0,2-3", "layers.2 all_gather[dp] x1 of 8 B",
         "line 10: it"),
        ("forward layers.{0..3} unshard x1\n", "forward layers.{0..1} unshard x1\nforward layers."
         "{2..3} unshard x1\n", "unshard x1'; expected 'forward layers.{0..3} unshard x1'"),
        ("forward layers.{0..3} unshard x1\n", "forward layers.{0..3} unshard x1\n" * 2,
         "line 9: it"),
        ("32_792", "32_793", "line 10: it reads 'total all_gather[dp] x35 32_793 B, s"),
    ],
)  # fmt: skip
def test_a_recording_refuses_bad_rows_and_totals(old, new, complaint):
    assert old in COMM
    assert complaint in refused("comm", COMM.replace(old, new))


def test_rows_of_differing_ranks_are_not_duplicates():
    line = "forward norm all_gather[dp] x1 of 8 B int64 ranks 0,2-3\n"
    text = COMM.replace(line, line + line.replace("x1", "x2").replace("0,2-3", "1"))
    text = text.replace("x35 32_792", "x37 32_808")
    assert format_profile(parse_comm(text)).partition("\n")[2] == text.partition("\n")[2]


@pytest.mark.parametrize("kind", READERS)
def test_an_error_quotes_at_most_200_characters(kind):
    text = READERS[kind][0]
    for old in ("layers", "world_size 8", "mesh dp", "{0..3}", "dp=4", "# pytest", "end", "total"):
        for new in ("x" * 9000, "é ☃ \\" * 900, "{" * 9000, "9" * 9000, "{0,0" + ",1" * 3000 + "}"):
            message = refused(kind, text.replace(old, f"{new}(", 1))
            quotes = sum(len(quote) for quote in re.findall(r"'[^']*'", message))
            assert quotes < 330, message  # 200 of the file's, and our own examples
            assert len(message) < 600


@pytest.mark.parametrize("kind", READERS)
def test_line_ends_of_other_systems_read_alike(kind):
    text, read = READERS[kind]
    assert read(text.replace("\n", "\r\n")) == read(text)
    message = refused(kind, text.replace("\n", "\r"))
    assert "line 1: the file ends with" in message


def test_the_largest_world_is_that_of_the_options():
    assert lines.MAX_WORLD_SIZE == options.MAX_SIMULATED


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_more_than_4_mib_is_refused(kind, tmp_path):
    text = READERS[kind][0].replace("layers", "l" * (4 << 20))
    problem = f"line 1: the file has {len(text)} bytes; expected a snapshot of at most 4194304 b"
    assert problem in refused(kind, text)
    (tmp_path / "x.comm").write_text(text)
    with pytest.raises(SnapshotFormatError, match=problem):
        read_snapshot(tmp_path / "x.comm", where="x.comm")


def layers_of_experts(layers, experts):
    """A recording of as many names as models have."""
    lines = []
    for phase in ("forward", "backward"):
        lines += [
            f"{phase} l.{{0..{layers - 1}}}.e.{{0..{experts - 1}}} all_gather[dp] x1 of 8 B",
            f"{phase} l.{{0..{layers - 1}}} unshard x1",
        ]
    count = 2 * layers * experts
    return (
        "# pytest-fsdp-comm 2 comm | x\nworld_size 4096\nmesh dp=4096 stride 1\n"
        + "\n".join(lines)
        + f"\ntotal all_gather[dp] x{count} {8 * count:_} B\nend\n"
    )


@pytest.mark.release
def test_read_100_layers_with_hundreds_of_experts(tmp_path):
    file = tmp_path / "x.comm"
    file.write_text(layers_of_experts(126, 256))
    assert len(read_snapshot(file, where="x").profile.collectives) == 2 * 126 * 256


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_nothing_but_a_regular_file_is_read(tmp_path, make, problem):
    make(tmp_path / "x.comm")
    with pytest.raises(SnapshotFormatError) as caught:
        read_snapshot(tmp_path / "x.comm", where="x.comm")
    assert str(caught.value).startswith(f"x.comm, line 1: it {problem}; ")
    assert "record it again with --snapshot-update" in str(caught.value)


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "real").write_text(TREE.replace("\n", "\r\n"), newline="")
    (tmp_path / "x.comm").symlink_to("real")
    assert read_snapshot(tmp_path / "x.comm", where="x") == TREE
    assert read_snapshot(tmp_path / "none", where="x") is None
    (tmp_path / "dangling").symlink_to("none")
    assert read_snapshot(tmp_path / "dangling", where="x") is None


TREES = [parse_tree(text) for text in (TREE, TREE.replace("true", "false"))]


def ranks_text(*numbers):
    return tree_text.format_profile(merge({rank: TREES[which] for rank, which in numbers}))


def test_trees_of_ranks_that_differ_are_read_back():
    text = ranks_text((0, 0), (2, 1), (3, 0), (4, 0))
    assert [line for line in text.splitlines() if line.startswith("ranks")] == [
        "ranks 0,3-4",
        "ranks 2",
    ]
    assert parse_trees(text).trees == {(0, 3, 4): TREES[0], (2,): TREES[1]}
    assert parse_trees(TREE).trees == {(): TREES[0]}
    assert parse_tree(text) is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("ranks 2\n", "ranks 3\n", "line 2: it reads 'ranks 0,3'; expected 'ranks 0'"),
        ("ranks 2\n", "ranks 9\n", "line 10: it reads 'ranks 9': bad ranks '9'; expected ranks fr"),
        ("=false", "=true", "line 2: it reads 'ranks 0,3'; expected 'world_size 8'"),
        ("ranks 0,3\n", "", "line 2: it reads '  world_size 8'; expected 'world_size <N>'"),
        ("  unit", "unit", "line 6: it reads 'unit layers.{0..3} fsdp2 shard=dp reshard_after"),
        ("4 parameters\n  end\nend", "4 parameters\nend", "line 17: it reads 'end'; expected '"),
        ("=false\n", "=maybe\n", "line 14: it reads 'unit layers.{0..3} fsdp2 shard=dp reshard_"),
    ],
)
def test_a_broken_document_of_ranks_is_refused(old, new, complaint):
    text = ranks_text((0, 0), (2, 1), (3, 0))
    assert old in text
    assert complaint in refused("tree", text.replace(old, new))
