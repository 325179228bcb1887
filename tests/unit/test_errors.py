"""What errors quote, and the one escape of names."""

import pickle

import pytest

from pytest_fsdp_comm.errors import FsdpCommError, RecordingError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0 é 漢 😀", "layers.0 é 漢 😀"),
        ("\x1b[31m\x00\x7f\x9b", r"\x1b[31m\x00\x7f\x9b"),
        ("a\n::error::\r\t", r"a\n::error::\r\t"),
        ("\u202e\u2028\udc80\U000e0001", r"\u202e\u2028\udc80\U000e0001"),
    ],
)
def test_printable_characters_stay_and_others_are_escaped_as_in_python(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_intended_line_breaks_are_kept():
    assert printable("a\n\tb\r", "\n\t") == "a\n\tb\\r"


def test_every_error_of_ours_is_printable_and_keeps_its_lines():
    error = RecordingError("no module 'a\x1b'\n  in it")
    assert str(error) == "no module 'a\\x1b'\n  in it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  # its own
    assert str(FsdpCommError()) == ""
