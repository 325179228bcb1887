"""Lists of ranks: one text for each set, short for meshes; other texts are rejected."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fsdp_comm.text.rank_lists import (
    RANKS_PATTERN,
    find_runs,
    group_ranks_by_text,
    name_ranks,
    read_ranks,
    write_ranks,
)


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ((), ()),
        ((3,), ((3, 3),)),
        ((0, 1, 2, 5, 7, 8), ((0, 2), (5, 5), (7, 8))),
    ],
)
def test_consecutive_numbers_form_runs(numbers, runs):
    assert find_runs(numbers) == runs


def test_ranks_are_named_in_ascending_order():
    assert name_ranks((3, 0, 2)) == "ranks 0, 2-3"
    assert name_ranks([12]) == "rank 12"
    assert name_ranks(range(0, 64, 8)) == "ranks 0-56/8"
    assert group_ranks_by_text({2: "b", 1: "a", 0: "b"}) == [([0, 2], "b"), ([1], "a")]


def blocks(first, length, distance, count):
    """Return the ranks of runs with equal length and distance."""
    starts = range(first, first + count * distance, distance)
    return [rank for start in starts for rank in range(start, start + length)]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0-1"),
        ([0, 2, 3], "0,2-3"),
        ([0, 2, 4], "0,2,4"),  # three are listed, four are folded
        ([0, 2, 4, 6], "0-6/2"),
        (blocks(0, 1, 2, 32), "0-62/2"),
        (blocks(0, 8, 16, 3), "0-7,16-23,32-39"),
        (blocks(0, 8, 16, 4), "0-55:8/16"),
        (blocks(1, 7, 8, 512), "1-4095:7/8"),  # tensor parallelism of 8, without its first rank
        # The first entry folds as many as possible: 10 is the third of 0, 5, 10, 15.
        ([0, 5, 10, 15, 17, 19, 21, 23], "0-15/5,17-23/2"),
        ([0, 5, 10, 12, 14, 16], "0,5,10-16/2"),
        # A run of another length ends the fold and does not start one.
        ([0, 2, 4, 6, 8, 9], "0-6/2,8-9"),
        ([0, 1, 3, 5, 7, 9], "0-1,3-9/2"),
        # Two ranks of every eight; the last of one eight and the first of the next form a run.
        (sorted({*range(0, 4096, 8), *range(7, 4096, 8)}), "0,7-4088:2/8,4095"),
        # The first 32 of dp in each of 4 stages, for one rank of tp.
        (
            [512 * stage + 8 * dp for stage in range(4) for dp in range(32)],
            "0-248/8,512-760/8,1024-1272/8,1536-1784/8",
        ),
    ],
)
def test_ranks_of_a_mesh_have_short_texts(ranks, text):
    assert write_ranks(ranks) == text
    assert not text or read_ranks(text, 4096) == tuple(ranks)


def expanded(text):
    """Read a text with an independent parser."""
    ranks = []
    for entry in text.split(","):
        numbers, _, distance = entry.partition("/")
        numbers, _, length = numbers.partition(":")
        first, _, last = numbers.partition("-")
        starts = range(int(first), int(last or first) + 1, int(distance or 1))
        ranks += [start + place for start in starts for place in range(int(length or 1))]
    return ranks


MESHES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@st.composite
def ranks_of_meshes(draw):
    """Generate ranks that share mesh coordinates: unions of such sets, minus some ranks."""
    ranks_read = set()
    for sizes in draw(st.lists(MESHES, min_size=1, max_size=2)):
        chosen = [
            draw(st.just(range(size)) | st.sets(st.integers(0, size - 1), min_size=1))
            for size in sizes
        ]
        for coordinates in product(*chosen):
            rank = 0
            for size, coordinate in zip(sizes, coordinates, strict=True):
                rank = rank * size + coordinate
            ranks_read.add(rank)
    return sorted(ranks_read - draw(st.sets(st.integers(0, 99), max_size=3))) or [0]


SETS = ranks_of_meshes() | st.sets(st.integers(0, 200), min_size=1).map(sorted)


@given(SETS)
def test_write_ranks_round_trips(ranks):
    text = write_ranks(ranks)
    assert re.fullmatch(RANKS_PATTERN, text)
    assert read_ranks(text, ranks[-1] + 1) == tuple(ranks)
    assert expanded(text) == ranks


def test_different_ranks_have_different_texts():
    sets = [[rank for rank in range(13) if number >> rank & 1] for number in range(1, 1 << 13)]
    assert len({write_ranks(ranks) for ranks in sets}) == len(sets)


@given(SETS, st.data())
def test_read_ranks_accepts_only_written_texts(ranks, data):
    text = write_ranks(ranks)
    place = data.draw(st.integers(0, len(text)))
    new = data.draw(
        st.sampled_from(["", "0", "1", "8", ",", "-", "/", ":", "/2", ":1", ",9", "\uff11"])
    )
    mutated = text[:place] + new + text[place + data.draw(st.integers(0, 2)) :]
    try:
        ranks_read = read_ranks(mutated, 10_000)
    except ValueError:
        return
    assert write_ranks(ranks_read) == mutated
    assert (ranks_read == tuple(ranks)) == (mutated == text)


NUMBER = st.integers(0, 20).map(str)
ENTRY = st.builds("".join, st.tuples(
    NUMBER,
    st.just("") | NUMBER.map("-{}".format),
    st.just("") | NUMBER.map(":{}".format),
    st.just("") | NUMBER.map("/{}".format),
))  # fmt: skip


@given(st.lists(ENTRY, min_size=1, max_size=3).map(",".join))
def test_any_numbers_round_trip_or_are_rejected(text):
    try:
        ranks_read = read_ranks(text, 18)
    except ValueError:
        return
    assert write_ranks(ranks_read) == text
    assert expanded(text) == list(ranks_read)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,1", "expected '0-1'"),
        ("0,2,4,6", "expected '0-6/2'"),
        ("0-4/2", "expected '0,2,4'"),
        ("0-6:1/2", "expected '0-6/2'"),
        ("0-6/2,8", "expected '0-8/2'"),
        ("0,2-8/2", "expected '0-8/2'"),
        ("0-4/2,6-10/2", "expected '0-10/2'"),
        ("0-3/1", "expected '0-3'"),
        ("0-63:2/2", "expected '0-63'"),
        # The last rank is between two runs.
        ("0-7/2", "expected ranks from 0 to 63 in ascending order, such as 0,2-3"),
        ("0-14:2/4", "expected ranks from 0 to 63 in"),  # the last run would be cut short
        ("0-64/2", "expected ranks from 0 to 63 in"),
        ("0-99999999999/2", "expected ranks from 0 to 63 in"),
        ("0-6/99999999999", "expected ranks from 0 to 63 in"),
        ("8-2", "expected ranks from 0 to 63 in"),
        ("8-2/2", "expected ranks from 0 to 63 in"),
        ("8-2:3/4", "expected ranks from 0 to 63 in"),
        ("6-0/2", "expected ranks from 0 to 63 in"),
        ("0-6/2,3", "expected ranks from 0 to 63 in"),
        ("0-6/2,6", "expected ranks from 0 to 63 in"),
        ("0-6/0", "expected ranks from 0 to 63 in"),
        ("0-6/02", "expected ranks from 0 to 63 in"),
        ("0-6:/2", "expected ranks from 0 to 63 in"),
        ("0-6:2", "expected ranks from 0 to 63 in"),
        ("0/2", "expected ranks from 0 to 63 in"),
        ("", "expected ranks from 0 to 63 in"),
        (",", "expected ranks from 0 to 63 in"),
    ],
)
def test_other_text_is_rejected_with_expected_text(text, expected):
    with pytest.raises(ValueError, match=re.escape(f"bad ranks {text!r}: {expected}")):
        read_ranks(text, 64)
