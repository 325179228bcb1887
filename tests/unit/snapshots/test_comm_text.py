"""A profile as text and JSON: what is written is read back, and what is broken is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import (
    Collective,
    MeshAxis,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Source,
    Timing,
)
from pytest_fsdp_comm.comm.json import dump_recording, load_recording
from pytest_fsdp_comm.comm.profile import CommProfile, CommRow, Site, fold, merge
from pytest_fsdp_comm.errors import FsdpCommError, SnapshotFormatError
from pytest_fsdp_comm.snapshots.comm_text import format_profile, parse_profile
from pytest_fsdp_comm.text.codec import from_json, to_json

names = st.one_of(
    st.none(),
    st.from_regex(r"layers\.[0-9]{1,2}(\.(up|down))?", fullmatch=True),
    st.text(alphabet="ab.0{}()\\# +é", max_size=8),
)
axes = st.sampled_from(
    ["dp", "tp", "world", "odd axis", "a=b", "[x]", "%41", "\x07", "\ufeff", "\x85é"]
)
kinds = st.sampled_from(["all_gather", "reduce_scatter", "unknown:odd_op", "barrier"])


@st.composite
def recordings(draw, rank=0):
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
                dtype=st.sampled_from(["float32", "bfloat16", ""]),
                nbytes_sent=st.integers(0, 10**12),
                nbytes_received=st.integers(0, 10**12),
                source=st.sampled_from(Source),
                call_site=st.sampled_from(["", "a.py:1"]),
            ),
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
                is_explicit=st.sampled_from([True, False, None]),
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
        mesh_axes=tuple(MeshAxis(name=name, size=4) for name in used),
        collectives=tuple(collectives),
        reshards=tuple(reshards),
        redistributions=tuple(moves),
        timings=(Timing(category="all", seconds=0.5),),
        notes=("a note",),
    )


@given(recordings())
def test_a_recording_survives_json(recording):
    assert load_recording(dump_recording(recording)) == recording


@given(recordings())
def test_a_profile_survives_json_and_text(recording):
    profile = fold(recording)
    loaded = from_json(CommProfile, json.loads(json.dumps(to_json(profile))))
    assert loaded == profile
    assert [row.sites for row in loaded.rows] == [row.sites for row in profile.rows]
    assert parse_profile(format_profile(profile)) == profile


# Of a world of four; also such as the fake backend records, which leave some out.
RANKS = st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(st.data(), RANKS)
def test_a_profile_of_different_ranks_survives_text(data, ranks):
    shapes = data.draw(st.lists(recordings(), min_size=1, max_size=3))
    profile = merge(
        [fold(replace(data.draw(st.sampled_from(shapes)), rank=rank)) for rank in ranks]
    )
    assert profile.recorded_ranks == ranks
    text = format_profile(profile)
    found = parse_profile(text)
    assert found == parse_profile(text.replace("\n", "\r\n")) == profile
    assert found.named_ranks == profile.named_ranks <= set(ranks)
    assert format_profile(found).partition("\n")[2] == text.partition("\n")[2]
    assert compare(found, profile).changes == ()


@given(recordings(rank=0), recordings(rank=1), recordings(rank=2))
def test_a_profile_of_ranks_with_nothing_in_common_survives_text(first, second, third):
    profile = merge([fold(recording) for recording in (first, second, third)])
    assert parse_profile(format_profile(profile)) == profile


def row(owner, **changes):
    values = {
        "phase": Phase.FORWARD,
        "owner": owner,
        "kind": "all_gather",
        "axis": "dp",
        "count": 1,
        "nbytes": 1024,
    }
    return CommRow(**{**values, **changes})


def profile_of(*rows):
    return CommProfile(
        world_size=4,
        mesh_axes=(MeshAxis(name="dp", size=4),),
        rows=rows,
        backend="gloo",
        torch_version="2.13.0",
    )


PROFILE = profile_of(
    row(""),
    *(row(f"layers.{number}", nbytes=500_000) for number in range(3)),
    row("layers.10", count=2, ranks=(0, 2, 3)),
    row(None, phase=Phase.OUTSIDE, kind="unknown:odd", nbytes=0),
)
TEXT = """\
# pytest-fsdp-comm 1 comm | torch 2.13.0, gloo (not compared)
world_size 4
mesh dp=4
forward (root) all_gather[dp] x1 1_024 B
forward layers.{0..2} all_gather[dp] x1 500_000 B
forward layers.10 all_gather[dp] x2 1_024 B ranks 0,2-3
outside (no-module) unknown:odd[dp] x1 0 B
total all_gather[dp] x6 1_502_048 B
total unknown:odd[dp] x1 0 B
end
"""


def test_the_text_reads_back_as_the_profile():
    assert format_profile(PROFILE) == TEXT
    assert parse_profile(TEXT) == PROFILE


def test_a_long_name_moves_no_other_line():
    longer = profile_of(*PROFILE.rows, row("a.module.with.a.very.long.name", phase=Phase.BACKWARD))
    before, after = TEXT.splitlines(), format_profile(longer).splitlines()
    assert [line for line in before if line not in after] == ["total all_gather[dp] x6 1_502_048 B"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "f.comm, line 1: the file is empty; expected a snapshot"),
        ("\n", "f.comm, line 1: the file is empty; expected a snapshot"),
        ("hello\nend\n", "line 1: it reads 'hello'; expected '# pytest-fsdp-comm"),
        (TEXT[:200], "expected 'end' as the last line"),
        (TEXT.rstrip("\n"), "expected 'end' as the last line"),
        (TEXT.replace("1 comm", "2 comm"), "f.comm, line 1: the snapshot has format 2, this"),
        (TEXT.replace("1 comm", "1 tree"), "of kind 'tree'; expected one of kind 'comm'"),
        (TEXT.replace("world_size 4", "world_size four"), "line 2: it reads 'world_size four'"),
        (TEXT.replace("mesh dp=4", "mesh dp"), "line 3: it reads 'mesh dp'; expected"),
        (TEXT.replace("forward (root)", "foreward (root)"), "B'; expected a phase first: forward"),
        (TEXT.replace("layers.{0..2}", "layers.{2..0}"), "x1 500_000 B': bad numbers {2..0}"),
        (TEXT.replace("x1 500_000 B", "lots"), "line 5: it reads 'forward layers.{0..2} all"),
        (TEXT.replace("500_000", "500_001"), "f.comm, line 8: it reads 'total all_ga"),
        (TEXT.replace("total unknown:odd[dp] x1 0 B\n", ""), "the totals do not match the records"),
    ],
)  # fmt: skip
def test_what_is_broken_is_refused(text, complaint):
    with pytest.raises(SnapshotFormatError) as caught:
        parse_profile(text, where="f.comm")
    assert complaint in str(caught.value)
    assert "git checkout" in str(caught.value)


def test_json_of_another_kind_or_version_is_refused():
    document = dump_recording(Recording(rank=0, world_size=1, backend="", torch_version="2"))
    later = document.replace('"version":1', '"version":2')
    refused = r"^expected a recording (of JSON version 1|as JSON)"
    for wrong in ("{}", "[]", "not json", later, document.replace("recording", "tree", 1)):
        with pytest.raises(FsdpCommError, match=refused):
            load_recording(wrong)
    with pytest.raises(FsdpCommError, match=r"^recording\.rank: expected int, got '0'"):
        load_recording(document.replace('"rank":0', '"rank":"0"'))


def test_sites_are_for_reading_not_for_comparing():
    site = Site(issued_in="a", call_site="b.py:1", dtype="float32", count=1)
    assert profile_of(row("a", sites=(site,))) == profile_of(row("a"))
