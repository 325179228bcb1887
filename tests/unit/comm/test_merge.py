"""Profiles of ranks merged, restricted and exchanged: as row by row, and each text read once."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import parse_comm

from pytest_fsdp_comm import gathering
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import (
    Collective,
    Gap,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis, merge_axes
from pytest_fsdp_comm.comm.profile import (
    GatheredPeak,
    fold,
    merge,
    restrict,
    sort_rows,
)
from pytest_fsdp_comm.gathering import gather_values
from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.snapshots.documents import has_lost_ranks

WORLD = 6
RANKS = st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


def collective(owner, kind, nbytes):
    return Collective(
        index=0,
        kind=kind,
        op="c10d.x",
        owner=owner,
        issued_in=owner,
        phase=Phase.FORWARD,
        axis="dp",
        group_size=2,
        dtype="float32",
        nbytes_sent=nbytes,
        nbytes_received=nbytes,
        source=Source.FSDP,
        call_site="a.py:1",
    )


OWNERS = st.sampled_from(["", "a", "a.0", None])
COLLECTIVES = st.builds(
    collective, OWNERS, st.sampled_from(["all_gather", "unknown:odd"]), st.integers(1, 2)
)
RESHARDS = st.builds(
    Reshard,
    index=st.just(0),
    action=st.sampled_from(["unshard", "reshard"]),
    module=OWNERS,
    issued_in=st.none(),
    phase=st.just(Phase.BACKWARD),
    nbytes=st.just(1),
)
REDISTRIBUTIONS = st.builds(
    Redistribution,
    index=st.just(0),
    owner=OWNERS,
    issued_in=st.none(),
    phase=st.just(Phase.FORWARD),
    source_placements=st.just(("Replicate()",)),
    target_placements=st.sampled_from([("Shard(0)",), ("Shard(1)",)]),
    mesh_axes=st.just(("dp",)),
    is_explicit=st.booleans(),
    nbytes=st.just(1),
    call_site=st.just(""),
)
GAPS = st.builds(Gap, kind=st.just("unseen"), text=st.sampled_from("ab"))
RECORDINGS = st.builds(
    Recording,
    rank=st.just(0),
    world_size=st.just(WORLD),
    backend=st.just("gloo"),
    torch_version=st.just("2"),
    # An axis is there if something was sent over it.
    collectives=st.lists(COLLECTIVES, min_size=1, max_size=4).map(tuple),
    reshards=st.lists(RESHARDS, max_size=3).map(tuple),
    redistributions=st.lists(REDISTRIBUTIONS, max_size=3).map(tuple),
    peak_gathered_nbytes=st.integers(0, 2),
    notes=st.lists(st.sampled_from("xy"), max_size=2, unique=True).map(tuple),
    gaps=st.lists(GAPS, max_size=2, unique=True).map(tuple),
)
REGULAR = (MeshAxis(name="dp", size=2, dims=((2, 1),)),)


@st.composite
def ranks_profiles(draw, ranks=RANKS):
    """The profiles of some ranks, by rank; several may have the same."""
    shapes = draw(st.lists(RECORDINGS, min_size=1, max_size=3))
    is_irregular = draw(st.booleans())
    profiles = {}
    for rank in draw(ranks):
        axes = REGULAR
        if is_irregular:
            groups = ((0, 1, 3), (2, 4, 5))
            (own,) = (group for group in groups if rank in group)
            axes = (MeshAxis(name="dp", size=3, groups=(own,)),)
        shape = draw(st.sampled_from(shapes))
        profiles[rank] = fold(replace(shape, rank=rank, mesh_axes=axes))
    return profiles


def naively_merged(profiles):
    """What all ranks have in common and what not, rank by rank and row by row."""
    everyone = set(profiles)

    def whose(held_of):
        having = defaultdict(set)
        for rank, profile in profiles.items():
            for one in held_of(profile):
                having[one].add(rank)
        return [
            replace(one, ranks=() if ranks == everyone else tuple(sorted(ranks)))
            for one, ranks in having.items()
        ]

    first = next(iter(profiles.values()))
    return replace(
        first,
        mesh_axes=merge_axes(axis for one in profiles.values() for axis in one.mesh_axes),
        rows=sort_rows(whose(lambda profile: profile.rows)),
        peaks=tuple(sorted(whose(lambda profile: profile.peaks), key=lambda peak: peak.ranks)),
        recorded_ranks=() if len(profiles) == WORLD else tuple(sorted(profiles)),
        notes=tuple(dict.fromkeys(note for one in profiles.values() for note in one.notes)),
        gaps=tuple(whose(lambda profile: profile.gaps)),
    )


def all_of(profile):
    """With what `==` leaves out."""
    return (profile, profile.notes, profile.gaps, [row.sites for row in profile.rows])


@given(ranks_profiles())
def test_merging_is_as_rank_by_rank(profiles):
    assert all_of(merge(list(profiles.values()))) == all_of(naively_merged(profiles))


@given(ranks_profiles())
def test_merge_is_independent_of_shared_profiles(profiles):
    shared = {}
    alike = [
        shared.setdefault(repr(profile), profile)
        for profile in (replace(profile, recorded_ranks=()) for profile in profiles.values())
    ]
    whole = merge(alike, ranks=tuple(profiles))
    assert all_of(whole) == all_of(naively_merged(profiles))
    # What many rows have is there once.
    assert len({id(row.ranks) for row in whole.rows}) == len({row.ranks for row in whole.rows})


@given(ranks_profiles(ranks=st.just(tuple(range(WORLD)))), RANKS)
def test_restricted_profile_has_rows_of_its_ranks(profiles, ranks):
    whole = merge(list(profiles.values()))
    part = naively_merged({rank: profiles[rank] for rank in ranks})
    assert restrict(whole, ranks) == part
    assert restrict(parse_comm(format_profile(whole)), ranks) == part
    assert not compare(whole, part).changes


def recording(rank, **changes):
    values = {"rank": rank, "world_size": 4, "backend": "gloo", "torch_version": "2"}
    return Recording(**{**values, **changes})


def test_peaks_of_some_ranks_are_in_the_order_of_these():
    peaks = (1024, 8, 8, 1024)
    whole = merge([fold(recording(r, peak_gathered_nbytes=n)) for r, n in enumerate(peaks)])
    part = merge([fold(recording(r, peak_gathered_nbytes=peaks[r])) for r in (2, 3)])
    assert (
        restrict(whole, (2, 3)).peaks
        == part.peaks
        == (
            GatheredPeak(nbytes=8, ranks=(2,)),
            GatheredPeak(nbytes=1024, ranks=(3,)),
        )
    )
    assert not compare(whole, part).changes


@pytest.mark.parametrize(
    ("ranks", "other", "has_further"),
    [
        ((), (), False),
        ((), (0, 1, 2), True),
        ((), (0, 1, 2, 3), False),
        ((0, 3), (), False),
        ((0, 3), (0, 1, 3), False),
        ((0, 3), (0, 1), True),
    ],
)
def test_profile_of_more_ranks_is_not_replaced(ranks, other, has_further):
    whole = replace(fold(recording(0)), recorded_ranks=())
    profiles = [replace(whole, recorded_ranks=recorded) for recorded in (ranks, other)]
    assert has_lost_ranks(*profiles) == has_further


def test_a_gap_of_one_process_alone_is_merged():
    gap = Gap(kind="unseen", text="a thread")
    assert merge([fold(recording(0, world_size=1, gaps=(gap,)))]).gaps == (gap,)


def test_gap_twice_on_one_rank_is_not_of_all_ranks():
    gap = Gap(kind="unseen", text="a thread")
    whole = merge([fold(recording(0, gaps=(gap, gap))), fold(recording(1))])
    assert whole.gaps == (replace(gap, ranks=(0,)),)


def test_each_text_is_read_once(monkeypatch):
    read = []
    load = gathering.from_json
    monkeypatch.setattr(gathering, "from_json", lambda *args: read.append(args) or load(*args))
    one, other = (fold(recording(0, peak_gathered_nbytes=nbytes)) for nbytes in (1, 2))
    texts = []
    for value in (one, other):
        gather_values(lambda text: texts.append(text) or [text], "x", value)
    del read[:]
    gathered = [text for text in texts for _ in range(500)]
    values = gather_values(lambda _: gathered, "x", one)
    assert len(read) == 2
    assert values == [one] * 500 + [other] * 500
    assert len(set(map(id, values))) == 2


@given(ranks_profiles())
def test_profiles_are_exchanged_as_they_are(profiles):
    texts = []
    for profile in profiles.values():
        gather_values(lambda text: texts.append(text) or [text], "x", profile)
    gathered = gather_values(lambda _: texts, "x", next(iter(profiles.values())))
    assert list(map(all_of, gathered)) == list(map(all_of, profiles.values()))
    assert merge(gathered) == naively_merged(profiles)


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_restricting_reads_each_rank_list_once(num_ranks):
    class Counted(tuple):
        __slots__ = ()
        looked_at = 0

        def __iter__(self):
            Counted.looked_at += 1
            return super().__iter__()

    half = Counted(range(0, 4096, 2))
    one = fold(recording(0, world_size=4096, collectives=(collective("a", "all_gather", 1),)))
    rows = [replace(one.rows[0], owner=f"layers.{n}", ranks=half) for n in range(300)]
    profile = replace(one, rows=tuple(rows), recorded_ranks=())
    part = restrict(profile, tuple(range(num_ranks)))
    assert len(part.rows) == 300
    assert part.rows[0].ranks == (() if num_ranks == 1 else tuple(range(0, 64, 2)))
    assert Counted.looked_at <= 2
