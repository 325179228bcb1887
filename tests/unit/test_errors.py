"""Quoted and escaped texts in errors."""

import pickle

import pytest

from pytest_fsdp_comm.errors import FsdpCommError, RecordingError, printable


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("layers.0 é 漢 😀", "layers.0 é 漢 😀"),
        ("\x1b[31m\x00\x7f\x9b", r"\x1b[31m\x00\x7f\x9b"),
        ("a\n::error::\r\t", r"a\n::error::\r\t"),
        ("\u202e\u2028\udc80\U000e0001", r"\u202e\u2028\udc80\U000e0001"),
    ],
)
def test_printable_escapes_other_characters(text, escaped):
    assert printable(text) == escaped
    assert printable(text).isprintable()


def test_intended_line_breaks_are_kept():
    assert printable("a\n\tb\r", "\n\t") == "a\n\tb\\r"


def test_errors_are_printable_with_line_breaks():
    error = RecordingError("no module 'a\x1b'\n  in it")
    assert str(error) == "no module 'a\\x1b'\n  in it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  # its own
    assert str(FsdpCommError()) == ""
