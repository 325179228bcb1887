"""Write and read profiles as text and JSON, and refuse broken texts."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import parse_comm

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import (
    Beside,
    Collective,
    HostWait,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    GatheredPeak,
    Row,
    Site,
    fold,
    merge,
    remove_activation_sizes,
    sort_rows,
)
from pytest_fsdp_comm.errors import FsdpCommError, SnapshotFormatError
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.documents import SnapshotText, differs
from pytest_fsdp_comm.text.codec import from_json, to_json

names = st.one_of(
    st.none(),
    st.from_regex(r"layers\.[0-9]{1,2}(\.(up|down))?", fullmatch=True),
    st.text(alphabet="ab.0{}()\\# +é", max_size=8),
)
axes = st.sampled_from(
    ["dp", "tp", "world", "odd axis", "a=b", "[x]", "%41", "\x07", "\ufeff", "\x85é"]
)
kinds = st.sampled_from(["all_gather", "send", "broadcast", "unknown:odd_op", "barrier"])


# Ranks of one test are all simulated, or none is.
SIMULATED = st.just(True)  # noqa: FBT003  # a value


def layouts(name):
    return st.sampled_from(
        [
            MeshAxis(name=name, size=1),
            MeshAxis(name=name, size=4, dims=((4, 1),)),
            MeshAxis(name=name, size=2, dims=((2, 2),)),
            MeshAxis(name=name, size=3, groups=((0, 1, 3),)),
            MeshAxis(name=name, size=3, groups=((0, 2, 3),)),
        ]
    )


def with_what_its_kind_has(event):
    """Sends and receives have peers, some others a root, and FSDP's gathers a distance."""
    kept = {"all_gather": "ahead", "send": "peer", "broadcast": "root_rank"}.get(event.kind)
    others = {"ahead", "peer", "root_rank"} - {kept}
    return replace(event, **dict.fromkeys(others))


@st.composite
def recordings(draw, rank=0, overlap=st.booleans()):  # noqa: B008  # strategies are immutable
    shows_overlap = draw(overlap)
    waits = draw(
        st.lists(
            st.builds(
                HostWait,
                index=st.just(0),
                way=st.sampled_from(["item", "copy_to_host"]),
                owner=names,
                issued_in=names,
                phase=st.sampled_from(Phase),
                call_site=st.sampled_from(["", "a.py:1"]),
            ),
            max_size=3 if shows_overlap else 0,
        )
    )
    collectives = draw(
        st.lists(
            st.builds(
                Collective,
                index=st.just(0),
                kind=kinds,
                op=st.just("c10d.x"),
                owner=names,
                issued_in=names,
                phase=st.sampled_from(Phase),
                axis=axes,
                group_size=st.just(4),
                ahead=st.sampled_from([None, 0, 1, 2]),
                is_async=st.sampled_from([None, False, True]),
                peer=st.sampled_from([None, 1, 2, 3]),
                root_rank=st.sampled_from([None, 0, 3]),
                dtype=st.sampled_from(["float32", "bfloat16", ""]),
                nbytes_sent=st.integers(0, 10**12),
                nbytes_received=st.integers(0, 10**12),
                source=st.sampled_from(Source),
                call_site=st.sampled_from(["", "a.py:1"]),
                role=st.sampled_from([None, *Role]),
                exposed=st.booleans() if shows_overlap else st.none(),
                beside=st.sampled_from([(), (Beside(module="a", flops=2),)]),
            ).map(with_what_its_kind_has),
            max_size=8,
        )
    )
    reshards = draw(
        st.lists(
            st.builds(
                Reshard,
                index=st.just(0),
                action=st.sampled_from(["unshard", "reshard"]),
                module=names,
                issued_in=names,
                phase=st.sampled_from(Phase),
                nbytes=st.integers(0, 99),
            ),
            max_size=4,
        )
    )
    moves = draw(
        st.lists(
            st.builds(
                Redistribution,
                index=st.just(0),
                owner=names,
                issued_in=names,
                phase=st.sampled_from(Phase),
                source_placements=st.sampled_from([("Shard(dim=0)",), ("_Odd(dim=0, sf=2)", "P")]),
                target_placements=st.just(("Replicate()",)),
                mesh_axes=st.just(("dp",)),
                is_explicit=st.booleans(),
                nbytes=st.integers(0, 99),
                call_site=st.just(""),
            ),
            max_size=3,
        )
    )
    used = sorted({event.axis for event in collectives})
    return Recording(
        rank=rank,
        world_size=4,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=tuple(draw(layouts(name)) for name in used),
        peak_gathered_nbytes=draw(st.integers(0, 10**12)),
        collectives=tuple(collectives),
        reshards=tuple(reshards),
        redistributions=tuple(moves),
        shows_overlap=shows_overlap,
        host_waits=tuple(waits),
        timings=(("all", 0.5),),
        notes=("a note",),
    )


@given(recordings())
def test_a_recording_survives_json(recording):
    assert load_recordings(dump_recordings([recording]))[0] == recording


@given(recordings())
def test_a_profile_survives_json_and_text(recording):
    profile = fold(recording)
    loaded = from_json(CommProfile, json.loads(json.dumps(to_json(profile))))
    assert loaded == profile
    assert [row.sites for row in loaded.rows] == [row.sites for row in profile.rows]
    assert parse_comm(format_profile(profile)) == profile
    relaxed = remove_activation_sizes(profile)
    assert parse_comm(format_profile(relaxed)) == relaxed


# Of a world of four; also such as the fake backend records, which leave some out.
RANKS = st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(st.data(), RANKS)
def test_a_profile_of_different_ranks_survives_text(data, ranks):
    shapes = data.draw(st.lists(recordings(overlap=SIMULATED), min_size=1, max_size=3))
    profile = merge(
        [fold(replace(data.draw(st.sampled_from(shapes)), rank=rank)) for rank in ranks]
    )
    assert profile.recorded_ranks == (() if len(ranks) == profile.world_size else ranks)
    text = format_profile(profile)
    found = parse_comm(text)
    assert found == parse_comm(text.replace("\n", "\r\n")) == profile
    assert format_profile(found).partition("\n")[2] == text.partition("\n")[2]
    assert compare(found, profile).changes == ()


@given(*(recordings(rank=rank, overlap=SIMULATED) for rank in range(3)))
def test_format_ranks_with_disjoint_rows_round_trips(first, second, third):
    profile = merge([fold(recording) for recording in (first, second, third)])
    assert parse_comm(format_profile(profile)) == profile


def row(owner, count=1, nbytes=1024, dtype="float32", **changes):
    values = {
        "phase": Phase.FORWARD,
        "owner": owner,
        "what": "all_gather",
        "axis": "dp",
    }
    alike = Calls(count=count, nbytes=nbytes, dtype=dtype)
    return Row(**{**values, "calls": (alike,), **changes})


def profile_of(*rows, **changes):
    return CommProfile(
        **changes,
        world_size=4,
        mesh_axes=(MeshAxis(name="dp", size=4, dims=((4, 1),)),),
        rows=sort_rows(rows),
        backend="gloo",
        torch_version="2.13.0",
    )


CALLS = (
    Calls(count=4, is_object=True),
    Calls(count=1, nbytes=32, dtype="float32", is_async=True),
    Calls(count=1, nbytes=64, dtype="bfloat16", role="parameters", ahead=1),
    Calls(count=2, nbytes=64, dtype="float32"),
)
PROFILE = profile_of(
    row(""),
    *(row(f"layers.{number}", nbytes=500_000) for number in range(3)),
    row("layers.10", count=2, nbytes=512, ranks=(0, 2, 3)),
    row(None, phase=Phase.OUTSIDE, what="unknown:odd", nbytes=0, dtype=""),
    row("", phase=Phase.BACKWARD, calls=CALLS),
    peaks=(GatheredPeak(nbytes=2048),),
)
TEXT = """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
world_size 4
mesh dp=4 stride 1
forward (root) all_gather[dp] x1 of 1_024 B float32
forward layers.{0..2} all_gather[dp] x1 of 500_000 B float32
forward layers.10 all_gather[dp] x2 of 512 B float32 ranks 0,2-3
backward (root) all_gather[dp] x4 of objects, x1 of 32 B float32 async, x1 of 64 B bfloat16 \
parameters ahead 1, x2 of 64 B float32
outside (no-module) unknown:odd[dp] x1
peak gathered 2_048 B
total all_gather[dp] x54 6_008_064 B and 16 of unknown size, sum of 4 ranks
total unknown:odd[dp] x4 0 B, sum of 4 ranks
end
"""


def test_the_text_reads_back_as_the_profile():
    assert format_profile(PROFILE) == TEXT
    assert parse_comm(TEXT) == PROFILE


ACTIVATIONS = (
    Calls(count=1, is_object=True, role="activations"),
    Calls(count=1, nbytes=0, dtype="float32", role="activations"),
    Calls(count=2, nbytes=64, dtype="float32", role="activations"),
    Calls(count=4, nbytes=64, dtype="bfloat16", role="activations", is_async=True),
    Calls(count=1, nbytes=64, dtype="float32", role="parameters"),
    Calls(count=1, nbytes=64, dtype="float32", role="gradients"),
    Calls(count=1, nbytes=64, dtype="float32"),
)
RELAXED = remove_activation_sizes(profile_of(row("a", calls=tuple(sorted(ACTIVATIONS)))))
# The bytes of the totals are those of the three other calls.
RELAXED_TEXT = """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, gloo (not compared)
world_size 4
mesh dp=4 stride 1
activation sizes not compared
forward a all_gather[dp] x1 of objects activations, x4 of bfloat16 activations async, x3 of \
float32 activations, x1 of 64 B float32, x1 of 64 B float32 gradients, x1 of 64 B float32 parameters
total all_gather[dp] x11 192 B and 8 of unknown size
end
"""


def test_total_of_unsized_calls_is_not_0_bytes():
    profile = profile_of(row(None, calls=CALLS[:1]))
    assert "\ntotal all_gather[dp] x4 of unknown size\n" in format_profile(profile)
    assert parse_comm(format_profile(profile)) == profile


def test_activations_without_sizes_have_one_text():
    assert format_profile(RELAXED) == RELAXED_TEXT
    assert parse_comm(RELAXED_TEXT) == RELAXED
    assert remove_activation_sizes(RELAXED) == RELAXED


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("activation sizes not compared\n", "", "line 4: it reads 'forward a"),
        ("x3 of float32", "x3 of 64 B float32", "activations async, x3 of 64 B float32"),
        ("x3 of float32", "x3 of 0 B float32", "activations async, x3 of 0 B float32"),
        ("64 B float32 gradients", "float32 gradients", ", x1 of float32 gradients, "),
        (
            "x3 of float32 activations",
            "x3 activations",
            "expected 'forward a all_gather[dp] x3 act",
        ),
        ("sizes not", "sizes are not", "line 4: it reads 'activation sizes are not compared'"),
        ("compared\nf", "compared\nasync unknown\nf", "line 4: it reads 'activation sizes"),
        (
            "compared\nf",
            "compared\nactivation sizes not compared\nf",
            "line 5: it reads 'activation sizes not compared'",
        ),
        ("192 B and", "576 B and", "expected 'total all_gather[dp] x11 192 B and 8 of unknown"),
        ("and 8 of", "and 9 of", "expected 'total all_gather[dp] x11 192 B and 8 of unknown"),
    ],
)
def test_sizes_that_do_not_fit_the_header_are_refused(old, new, complaint):
    text = RELAXED_TEXT.replace(old, new)
    assert text != RELAXED_TEXT
    with pytest.raises(SnapshotFormatError) as caught:
        parse_comm(text, where="f.comm")
    assert complaint in str(caught.value)


OVERLAP_TEXT = """\
# pytest-fsdp-comm 2 comm | torch 2.13.0, fake (not compared)
world_size 4
mesh dp=4 stride 1
overlap known
forward a all_gather[dp] x2 of 64 B float32 ahead 1, x1 of 64 B float32 ahead 1 exposed
forward a host_wait item x2
forward b host_wait copy_to_host x1
total all_gather[dp] x3 192 B
end
"""


def test_overlap_survives_text():
    profile = parse_comm(OVERLAP_TEXT)
    assert profile.shows_overlap
    assert [row.exposed_nbytes for row in profile.rows] == [64, 0, 0]
    assert [row.what for row in profile.rows] == ["all_gather", "item", "copy_to_host"]
    assert format_profile(profile).splitlines()[1:] == OVERLAP_TEXT.splitlines()[1:]


@pytest.mark.parametrize(
    ("removed", "complaint"),
    [
        (
            ("overlap known\n",),
            "line 4: it reads 'forward a all_gather[dp] x2 of 64 B float32 ahead 1, x1 of 64 B "
            "float32 ahead 1 exposed'; expected a line 'overlap known' above, without which a "
            "snapshot has neither 'exposed' nor 'host_wait'",
        ),
        (
            ("overlap known\n", " exposed"),
            "line 5: it reads 'forward a host_wait item x2'; expected a line 'overlap known'",
        ),
        ((" known",), "line 4: it reads 'overlap'; expected something like '<phase> <module>"),
        (("item ",), "line 6: it reads 'forward a host_wait x2'; expected something like"),
        ((" ahead 1 exposed",), "line 5: it reads 'forward a all_gather[dp] x2"),
    ],
)
def test_overlap_words_need_their_line(removed, complaint):
    text = OVERLAP_TEXT
    for part in removed:
        text = text.replace(part, "")
    with pytest.raises(SnapshotFormatError) as caught:
        parse_comm(text, where="f.comm")
    assert complaint in str(caught.value)


def test_ranks_that_differ_in_a_mesh_have_short_lines():
    # 8 stages of 64 ranks of dp, of 8 of tp each: the stages have layers of their own, and the
    # first rank of each tp group sends something more.
    mesh = [range(stage * 512, (stage + 1) * 512) for stage in range(8)]
    stages = [row(f"layers.{n}", ranks=tuple(ranks)) for n, ranks in enumerate(mesh)]
    first = row("norm", count=2, ranks=tuple(range(0, 4096, 8)))
    others = row("norm", ranks=tuple(rank for rank in range(4096) if rank % 8))
    profile = replace(profile_of(*stages, first, others), world_size=4096)
    text = format_profile(profile)
    assert text.splitlines()[3:-2] == [
        *(
            f"forward layers.{stage} all_gather[dp] x1 of 1_024 B float32 "
            f"ranks {512 * stage}-{512 * stage + 511}"
            for stage in range(8)
        ),
        "forward norm all_gather[dp] x1 of 1_024 B float32 ranks 1-4095:7/8",
        "forward norm all_gather[dp] x2 of 1_024 B float32 ranks 0-4088/8",
    ]
    assert parse_comm(text) == profile


def test_a_long_name_moves_no_other_line():
    longer = replace(
        PROFILE,
        rows=sort_rows(
            (*PROFILE.rows, row("a.module.with.a.very.long.name", phase=Phase.BACKWARD))
        ),
    )
    before, after = TEXT.splitlines(), format_profile(longer).splitlines()
    (changed,) = [line for line in before if line not in after]
    assert changed.startswith("total all_gather[dp]")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (TEXT.replace("stride 1\n", "stride 1\nmesh tp=2 stride 2\n"), "line 4: it reads 'mesh tp"),
        (TEXT.replace("mesh dp=4 stride 1\n", ""), "expected an axis that has a 'mesh' line above"),
        (TEXT.replace("dp=4 stride 1", "dp=4"), "'mesh dp=4'; expected 'mesh dp=4 stride 1'"),
        (TEXT.replace("dp=4 stride 1", "dp=4 stride 1 groups 1"), "expected 'mesh dp=4 stride 1'"),
        (TEXT.replace("dp=4 stride 1", "dp=4 stride 1 groups x"), "expected 'mesh dp=4 stride 1'"),
        (TEXT.replace("dp=4 stride 1", "dp=1 stride 2"), "; expected 'mesh dp=1'"),
        (TEXT.replace("dp=4 stride 1", "dp=2 ranks 0,2"), "dp=2 ranks 0,2'; expected 'mesh dp=2 s"),
        ("", "f.comm, line 1: the file is empty; expected a snapshot"),
        (TEXT.replace("size 4\n", "size 4\nranks 0-2\n"), "float32 ranks 0,2-3'; expected 'forw"),
        (TEXT.replace("ahead 1", "ahead 0"), "bad calls 'x1 of 64 B bfloat16 parameters ahead 0'"),
        (TEXT.replace("x1 of 32", "x1 of 96"), "B float32 async, x1 of 64 B bfloat16"),
        (TEXT.replace("x4 of objects", "x4 of object"), "all_gather[dp] x4 of object,"),
        (TEXT.replace("2_048 B\n", "2048 B\n"), "expected 'peak gathered 2_048 B'"),
        (TEXT.replace("total unknown:odd[dp] x4 0 B, sum of 4 ranks\n", ""), "totals do not mat"),
    ],
)  # fmt: skip
def test_what_is_broken_is_refused(text, complaint):
    with pytest.raises(SnapshotFormatError) as caught:
        parse_comm(text, where="f.comm")
    assert complaint in str(caught.value)
    assert "git checkout" in str(caught.value)


def test_json_of_another_kind_or_version_is_refused():
    document = dump_recordings([Recording(rank=0, world_size=1, backend="", torch_version="2")])
    later = document.replace('"version":1', '"version":2')
    refused = r"^expected a recording( of JSON version 1|, but it is not valid JSON)"
    for wrong in ("{}", "[]", "not json", later, document.replace('"recording"', '"tree"', 1)):
        with pytest.raises(FsdpCommError, match=refused):
            load_recordings(wrong)
    with pytest.raises(
        FsdpCommError, match=r"^recording\.recordings\[0\]\.rank: expected int, got '0'"
    ):
        load_recordings(document.replace('"rank":0', '"rank":"0"'))


def test_sites_are_for_reading_not_for_comparing():
    site = Site(issued_in="a", call_site="b.py:1", calls=Calls(nbytes=1, dtype="float32", count=1))
    assert profile_of(row("a", sites=(site,))) == profile_of(row("a"))


def test_groups_of_an_axis_are_compared():
    """A file without a number of groups means one group."""
    old = SnapshotText(TEXT, where="old")
    text = TEXT.replace("dp=4 stride 1", "dp=4 stride 1 groups 3")
    new = SnapshotText(text, where="new")
    assert [axis.num_groups for axis in new.profile.mesh_axes] == [3]
    assert format_profile(new.profile).splitlines()[1:] == text.splitlines()[1:]
    assert differs(old, new)
    assert not differs(new, SnapshotText(format_profile(new.profile), where="again"))
