"""The first and the last part of a rank's output are kept, whatever lies between."""

import re

import pytest

from pytest_fsdp_comm.ranks.rank.kept_output import (
    KEPT_NBYTES,
    cut_middle,
    cut_middles,
    read_log_parts,
)

MIB = 1 << 20


def lines(count):
    return "".join(f"{number:07d}\n" for number in range(count))


@pytest.fixture
def file(tmp_path):
    """A file to append to, and its path."""
    with (tmp_path / "stdout").open("ab", buffering=0) as opened:
        yield opened, tmp_path / "stdout"


def read(path, start=0):
    with path.open("rb") as opened:
        return read_log_parts(opened.fileno(), [(start, path.stat().st_size)])


def test_a_text_that_is_not_long_is_kept_whole(file):
    opened, path = file
    assert read(path) == ""
    text = lines(2 * KEPT_NBYTES // 8)
    opened.write(text.encode())
    assert read(path) == text
    assert read(path, len(text)) == ""
    assert read(path, len(text) - 8) == text[-8:]
    assert cut_middle(text) == text


def test_of_a_long_text_both_ends_are_kept(file):
    opened, path = file
    text = lines(MIB)
    opened.write(text.encode())
    kept = read(path, 8)
    told = f"\n[... {len(text) - 8 - 2 * KEPT_NBYTES:,} bytes left out: only the first and last "
    told += "256 KiB are kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    assert kept == text[8:][:KEPT_NBYTES] + told + text[-KEPT_NBYTES:]
    short = cut_middle(text[8:])
    assert short == kept.replace("bytes left", "characters left")


def left_out(text):
    """What texts say that is left out."""
    return re.findall(r"^\[\.\.\. ([\d,]+ \w+) left out: ", str(text), re.MULTILINE)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((2 * KEPT_NBYTES,), None),
        ((KEPT_NBYTES, KEPT_NBYTES), None),
        ((KEPT_NBYTES, KEPT_NBYTES, 1), "1 bytes"),
        ((9 * MIB,), "8,912,896 bytes"),
        ((1, 5 * MIB, 1, 4 * MIB, 1), "8,912,899 bytes"),
        ((1, 1, 5 * MIB, 1), "4,718,595 bytes"),
    ],
)
def test_parts_are_shortened_as_one_text(file, sizes, count):
    opened, path = file
    parts, whole = [], b""
    for number, size in enumerate(sizes):
        opened.write(b"of another report")
        start, data = path.stat().st_size, b"%d" % number * size
        opened.write(data)
        parts.append((start, start + size))
        whole += data
    with path.open("rb") as reading:
        kept = read_log_parts(reading.fileno(), parts)
    assert left_out(kept) == ([] if count is None else [count])
    assert kept[:KEPT_NBYTES] == whole[:KEPT_NBYTES].decode()
    assert kept[-KEPT_NBYTES:] == whole[-KEPT_NBYTES:].decode()
    # The report of the phase holds it as it is.
    assert cut_middle(kept) == kept


def test_undecodable_bytes_stay_bounded(file):
    opened, path = file
    opened.write(b"\xff" * MIB)
    kept = read(path)
    assert left_out(kept) == [f"{MIB - 2 * KEPT_NBYTES:,} bytes"]
    assert len(kept) < 2 * KEPT_NBYTES + 256
    assert cut_middle(kept) == kept


def test_every_text_of_a_report_is_shortened_once():
    text = "x" * 50_000_000
    told = [f"{50_000_000 - 2 * KEPT_NBYTES:,} characters"]
    assert left_out(cut_middle(text)) == told
    assert cut_middle(cut_middle(text)) == cut_middle(text)
    report = cut_middles(
        {"reprcrash": {"message": text, "lineno": 3}, "chain": [({"lines": ["a", text]}, None)]}
    )
    assert left_out(report["reprcrash"]["message"]) == told
    assert report["reprcrash"]["lineno"] == 3
    lines, crash = report["chain"][0]
    assert crash is None
    assert left_out("\n".join(lines["lines"])) == [f"{50_000_002 - 2 * KEPT_NBYTES:,} characters"]
    assert lines["lines"][0] == "a"


def test_many_lines_are_one_text():
    lines = [f"E   {number}" for number in range(1_000_000)]
    short = cut_middles({"lines": lines})["lines"]
    size = len("\n".join(lines)) - 2 * KEPT_NBYTES
    assert left_out("\n".join(short)) == [f"{size:,} characters"]
    assert (short[0], short[-1]) == (lines[0], lines[-1])
    native = ["Traceback:\n", *(f"{line}\n" for line in lines)]
    short = "".join(cut_middles({"lines": native})["lines"])
    assert left_out(short) == [f"{len(''.join(native)) - 2 * KEPT_NBYTES:,} characters"]
    assert short.startswith("Traceback:\nE   0\nE   1\n")
    assert short.endswith("\nE   999999\n")
    # An assertion's explanation of some hundred kB stays whole.
    few = lines[:50_000]
    assert cut_middles({"lines": few})["lines"] == few
