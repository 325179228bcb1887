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


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("::stop-commands::x", r"\x3a:stop-commands::x"),
        (" \t ::error::", r" \t ::error::"),
        ("  ::error file=x::y", r"  \x3a:error file=x::y"),
        ("\r::error::", r"\r::error::"),
        (":::x", r"\x3a::x"),
        ("a ##[error]x ##[group]", r"a \x23#[error]x \x23#[group]"),
        ("###[error]", r"#\x23#[error]"),
        ("##vso[task.setvariable]", r"\x23#vso[task.setvariable]"),
        # No runner reads these.
        ("tests/test_a.py::test_x[a]", "tests/test_a.py::test_x[a]"),
        ("a ::error::", "a ::error::"),
        (":x::y", ":x::y"),
        ("## heading [link]", "## heading [link]"),
        ("#[x] # #[y]", "#[x] # #[y]"),
        ("###", "###"),
    ],
)
def test_printable_breaks_commands_to_ci(text, escaped):
    assert printable(text) == escaped
    assert printable(escaped) == escaped


def test_printable_breaks_commands_in_each_line():
    lines = "x ::a::\n\t::error::\n\n ##[y]"
    assert printable(lines, "\n\t") == "x ::a::\n\t\\x3a:error::\n\n \\x23#[y]"


def test_intended_line_breaks_are_kept():
    assert printable("a\n\tb\r", "\n\t") == "a\n\tb\\r"


def test_errors_are_printable_with_line_breaks():
    error = RecordingError("no module 'a\x1b'\n  in it")
    assert str(error) == "no module 'a\\x1b'\n  in it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  # its own
    assert str(FsdpCommError()) == ""
