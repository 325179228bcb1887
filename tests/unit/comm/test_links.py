"""The lines of ini `fsdp_comm_links` become links, or an error that says what to write instead."""

import pytest

from pytest_fsdp_comm.comm.links import Link, Links, parse_links


def problem(line):
    """Why a line is refused that follows another."""
    with pytest.raises(ValueError, match=r"^fsdp_comm_links, line 2: ") as caught:
        parse_links(["tp: 400 GB/s 1 us", line])
    return str(caught.value).removeprefix("fsdp_comm_links, line 2: ")


@pytest.mark.parametrize(
    ("speed", "bandwidth", "latency_s", "text"),
    [
        ("50 GB/s 10 us", 50e9, 10e-6, "50 GB/s, 10 us"),
        ("50GB/s 10us", 50e9, 10e-6, "50 GB/s, 10 us"),
        ("2.5 GiB/s   500 ns", 2.5 * 2**30, 500e-9, "2.5 GiB/s, 500 ns"),
        ("100 MB/s 0.5 ms", 100e6, 0.5e-3, "100 MB/s, 0.5 ms"),
        ("3 MiB/s 0 us", 3 * 2**20, 0.0, "3 MiB/s, 0 us"),
        ("400 Gbit/s 1 us", 50e9, 1e-6, "400 Gbit/s, 1 us"),
    ],
)
def test_each_unit_is_bytes_and_seconds(speed, bandwidth, latency_s, text):
    (link,) = parse_links([f"dp: {speed}"]).by_axis.values()
    assert link == Link(
        bandwidth=pytest.approx(bandwidth), latency_s=pytest.approx(latency_s), text=text
    )


def test_a_star_stands_for_all_axes_without_a_line():
    links = parse_links(["dp: 50 GB/s 10 us", "", "*: 400 GB/s 1 us", "a:b: 1 GB/s 1 us"])
    assert [links.of(axis).bandwidth for axis in ("dp", "tp", "a:b")] == [50e9, 400e9, 1e9]
    assert parse_links(["dp: 50 GB/s 10 us"]).of("tp") is None


def test_no_lines_are_no_links():
    assert parse_links(["", "  "]) == Links()
    assert not Links()


@pytest.mark.parametrize(
    "line",
    [
        "dp 50 GB/s 10 us",
        ": 50 GB/s 10 us",
        "dp:",
        "dp: 50 GB/s",
        "dp: 10 us 50 GB/s",
        "dp: 50 GB/s, 10 us",
        "dp: -50 GB/s 10 us",
        "dp: 5e3 GB/s 10 us",
        "dp: \N{FULLWIDTH DIGIT FIVE} GB/s 10 us",
        "dp: 1234567890 GB/s 1 us",
    ],
)
def test_what_has_another_form_is_an_error_that_shows_the_form(line):
    assert problem(line) == (
        f"cannot read {line!r}; expected '<axis>: <bandwidth> <latency>', such as 'dp: 50 GB/s "
        "10 us'"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "dp: 50 Gb/s 10 us",
            "unknown unit 'Gb/s' in 'dp: 50 Gb/s 10 us'; expected one of GB/s, GiB/s, MB/s, "
            "MiB/s, Gbit/s",
        ),
        (
            "dp: 50 GB/s 10 s",
            "unknown unit 's' in 'dp: 50 GB/s 10 s'; expected one of ns, us, ms",
        ),
        ("dp: 0 GB/s 10 us", "expected a bandwidth above 0, got 'dp: 0 GB/s 10 us'"),
        ("tp: 1 GB/s 1 us", "'tp' is also in line 1; keep one of the two"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_is_allowed(line, text):
    assert problem(line) == text
