"""The first and the last part of a rank's output are kept, whatever lies between."""

import errno
import os
import sys

import pytest

from pytest_fsdp_comm.ranks.rank import kept_output
from pytest_fsdp_comm.ranks.rank.kept_output import KEPT_NBYTES, OutputFile, read_kept, shortened

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
        return read_kept(opened.fileno(), start)


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
    told = f"\n[... {len(text) - 8 - 2 * KEPT_NBYTES} bytes left out: only the first and last "
    told += (
        "256 KiB of each stream and phase are kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    )
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
