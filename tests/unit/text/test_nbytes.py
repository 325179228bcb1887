"""Texts for numbers of bytes and their changes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_fsdp_comm.text.words import (
    show_flops,
    show_growth,
    show_nbytes,
    show_nbytes_change,
    show_nbytes_of,
)

KIB, MIB = 1024, 1024**2


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (MIB - 1, "1.0 MiB"),
        (2**70, "1048576.0 PiB"),
    ],
)
def test_bytes_are_rounded_to_one_decimal_of_a_unit(nbytes, text):
    assert show_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "unsized", "text"),
    [(0, 2, "2 of unknown size"), (2048, 1, "2.0 KiB and 1 of unknown size")],
)
def test_unknown_sizes_are_not_0_bytes(nbytes, unsized, text):
    assert show_nbytes(nbytes, unsized) == text
    assert show_nbytes_change(8, nbytes, (0, unsized)) == f"8 B -> {text}"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (1_468_006, 2_411_724, "1.4 -> 2.3 MiB"),
        (512, 2 * KIB, "512 B -> 2.0 KiB"),
        (2 * MIB, 0, "2.0 MiB -> 0 B"),
        (0, 2 * KIB, "0 -> 2.0 KiB"),
        (0, 8, "0 -> 8 B"),
        (8, 0, "8 -> 0 B"),
        # Equal in KiB, but not in bytes.
        (74_000, 74_008, "74_000 -> 74_008 B"),
        (MIB, MIB + 1, "1_048_576 -> 1_048_577 B"),
        (MIB, MIB, "1.0 -> 1.0 MiB"),
    ],
)
def test_nbytes_change_shows_every_difference(old, new, text):
    assert show_nbytes_change(old, new) == text


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (100, 163, "+63 %"),
        (1000, 1003, "+0.3 %"),
        (1000, 997, "-0.3 %"),
        (10**9, 10**9 + 1, "<0.1 % more"),
        (10**9, 10**9 - 1, "<0.1 % fewer"),
        (1000, 1099, "+9.9 %"),
        (10_000, 10_998, "+10 %"),
        (100, 299, "+199 %"),
        (100, 300, "x3.0"),
        (8, 812, "x102"),
        (8, 919_816, "over x1000"),
        (100, 50, "-50 %"),
        (100, 0, "-100 %"),
        (10_000, 1, "-99.9 %"),
        (0, 5, "new"),
        (5, 5, "unchanged"),
        (0, 0, "unchanged"),
    ],
)
def test_growth_is_a_percentage_or_a_factor(old, new, text):
    assert show_growth(old, new) == text


@given(st.integers(0, 10**15), st.integers(0, 10**15))
@example(1001, 1000)
def test_growth_never_rounds_to_unchanged(old, new):
    before, after = show_nbytes_change(old, new).split(" -> ")
    unit = after.partition(" ")[2]
    assert (before.removesuffix(f" {unit}") == after.removesuffix(f" {unit}")) == (old == new)
    growth = show_growth(old, new)
    assert (growth == "unchanged") == (old == new)
    assert (growth == "-100 %") == (new == 0 < old)
    assert growth not in {"+0.0 %", "-0.0 %", "+0 %", "-0 %"}
    assert (growth.startswith("-") or growth.endswith(" fewer")) == (new < old)


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (3 * 2**30, 51 * 2**30, "3.0 of 51.0 GiB"),
        (512 * 2**20, 2**30, "512.0 MiB of 1.0 GiB"),
        (8, 24, "8 of 24 B"),
        (8, 8 * 1024, "8 B of 8.0 KiB"),
        (2**20, 2**20, "1.0 of 1.0 MiB"),
    ],
)
def test_part_of_bytes_has_its_unit_only_if_needed(part, whole, text):
    assert show_nbytes_of(part, whole) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1_000, "1.0 kFLOP"),
        (999_949, "999.9 kFLOP"),
        (999_950, "1.0 MFLOP"),
        (28_500_000_000, "28.5 GFLOP"),
        (10**19, "10000.0 PFLOP"),
    ],
)
def test_flops_have_one_decimal(flops, text):
    assert show_flops(flops) == text
