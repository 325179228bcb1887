"""The first and the last part of a rank's output are kept, whatever lies between."""

import errno
import os
import re
import sys

import pytest

from pytest_fsdp_comm.ranks.rank import kept_output
from pytest_fsdp_comm.ranks.rank.kept_output import (
    KEPT_NBYTES,
    Kept,
    OutputFile,
    read_kept,
    shortened,
    shortened_texts,
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
        output, end = read_kept(opened.fileno(), start)
        return str(output), end


def test_a_text_that_is_not_long_is_kept_whole(file):
    opened, path = file
    assert read(path) == ("", 0)
    text = lines(2 * KEPT_NBYTES // 8)
    opened.write(text.encode())
    assert read(path) == (text, len(text))
    assert read(path, len(text)) == ("", len(text))
    assert read(path, len(text) - 8) == (text[-8:], len(text))
    assert shortened(text) == text


def test_of_a_long_text_both_ends_are_kept(file):
    opened, path = file
    text = lines(MIB)
    opened.write(text.encode())
    kept, end = read(path, 8)
    assert end == len(text)
    told = f"\n[... {len(text) - 8 - 2 * KEPT_NBYTES:,} bytes left out: only the first and last "
    told += "256 KiB are kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    assert kept == text[8:][:KEPT_NBYTES] + told + text[-KEPT_NBYTES:]
    short = shortened(text[8:])
    assert short == kept.replace("bytes left", "characters left")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no holes are made")
def test_the_disk_of_what_is_not_kept_is_freed(file):
    opened, path = file
    output = OutputFile(path)
    assert output.release(0) == 0
    text = lines(MIB)
    for _ in range(4):
        opened.write(text.encode())
        # What was written since the last look is left alone.
        output.release(0)
    size = 4 * len(text)
    assert output.release(0) < 3 * MIB
    assert path.stat().st_size == size
    kept, end = read(path)
    assert end == size
    head, told, tail = kept.split("\n[... ")[0], kept.count("left out"), kept[-KEPT_NBYTES:]
    assert (head, told, tail) == (text[:KEPT_NBYTES], 1, text[-KEPT_NBYTES:])
    assert "\0" not in kept
    # Whoever starts in a hole gets the end, and hears of the rest.
    kept, _ = read(path, 8 * MIB)
    assert kept.startswith("\n[... ")
    assert kept.endswith(text[-KEPT_NBYTES:])
    assert "\0" not in kept
    # The next phase starts: the last one has been read.
    assert output.release(size) < MIB
    opened.write(b"next")
    assert read(path, size) == ("next", size + 4)


def test_a_file_that_is_not_there_takes_nothing(tmp_path):
    assert OutputFile(tmp_path / "none").release(0) == 0


def test_a_file_that_vanishes_meanwhile_takes_nothing(file, monkeypatch):
    opened, path = file
    output = OutputFile(path)
    opened.write(b"x" * 8 * MIB)
    output.release(0)
    stat = os.stat

    def stat_and_remove(name):
        status = stat(name)
        path.unlink()
        return status

    monkeypatch.setattr(os, "stat", stat_and_remove)
    assert output.release(0) == 0


def test_where_there_are_no_holes_the_file_says_what_it_takes(file, monkeypatch):
    opened, path = file
    monkeypatch.setattr(kept_output, "_FALLOCATE", None)
    output = OutputFile(path)
    for _ in range(3):
        opened.write(b"x" * 4 * MIB)
        taken = output.release(0)
    assert taken >= 12 * MIB


@pytest.mark.parametrize("missing", [True, False], ids=["no such search", "search fails"])
def test_a_file_is_read_alike_where_the_system_finds_no_holes(file, monkeypatch, missing):
    opened, path = file
    text = lines(MIB)
    opened.write(text.encode())
    expected = read(path)
    if missing:
        monkeypatch.delattr(os, "SEEK_HOLE")
        monkeypatch.delattr(os, "SEEK_DATA")
    else:

        def fail(*_):
            raise OSError(errno.EINVAL, "not here")

        monkeypatch.setattr(os, "lseek", fail)
    assert read(path) == expected


def left_out(text):
    """What texts say that is left out."""
    return re.findall(r"^\[\.\.\. ([\d,]+ \w+) left out: ", str(text), re.MULTILINE)


def pieces(*sizes):
    """Bytes that a rank wrote one after another, each kept on its own."""
    return [Kept(b"%d" % number * size) + Kept() for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((2 * KEPT_NBYTES,), None),
        ((KEPT_NBYTES, KEPT_NBYTES), None),
        ((KEPT_NBYTES, KEPT_NBYTES, 1), "1 bytes"),
        ((99 * MIB,), "103,284,736 bytes"),
        ((50 * MIB, 1, 49 * MIB), "103,284,737 bytes"),
        ((1, 50 * MIB, 1, 49 * MIB, 1), "103,284,739 bytes"),
        ((1, 50 * MIB, 1), "51,904,514 bytes"),
    ],
)
def test_what_is_left_out_of_pieces_is_counted_once(sizes, count):
    whole = b"".join(b"%d" % number * size for number, size in enumerate(sizes))
    for start in range(len(sizes)):
        # In whatever order they are put together.
        parts = pieces(*sizes)
        parts[start : start + 2] = [sum(parts[start : start + 2], start=Kept())]
        kept = sum(parts, start=Kept())
        assert kept.nbytes == len(whole)
        assert left_out(kept) == ([] if count is None else [count])
        assert str(kept)[:KEPT_NBYTES] == whole[:KEPT_NBYTES].decode()
        assert str(kept)[-KEPT_NBYTES:] == whole[-KEPT_NBYTES:].decode()
        # The report of the phase holds it as it is.
        assert shortened(str(kept)) == str(kept)


def test_what_is_no_text_stays_bounded_and_counted():
    kept = Kept(b"\xff" * MIB) + Kept()
    assert left_out(kept) == [f"{MIB - KEPT_NBYTES // 2:,} bytes"]
    assert len(str(kept)) < 2 * KEPT_NBYTES + 256
    assert shortened(str(kept)) == str(kept)


def test_every_text_of_a_report_is_shortened_once():
    text = "x" * 50_000_000
    told = [f"{50_000_000 - 2 * KEPT_NBYTES:,} characters"]
    assert left_out(shortened(text)) == told
    assert shortened(shortened(text)) == shortened(text)
    report = shortened_texts(
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
    short = shortened_texts({"lines": lines})["lines"]
    size = len("\n".join(lines)) - 2 * KEPT_NBYTES
    assert left_out("\n".join(short)) == [f"{size:,} characters"]
    assert (short[0], short[-1]) == (lines[0], lines[-1])
    native = ["Traceback:\n", *(f"{line}\n" for line in lines)]
    short = "".join(shortened_texts({"lines": native})["lines"])
    assert left_out(short) == [f"{len(''.join(native)) - 2 * KEPT_NBYTES:,} characters"]
    assert short.startswith("Traceback:\nE   0\nE   1\n")
    assert short.endswith("\nE   999999\n")
    # An assertion's explanation of some hundred kB stays whole.
    few = lines[:50_000]
    assert shortened_texts({"lines": few})["lines"] == few
