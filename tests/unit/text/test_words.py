"""Paths and shell words in texts."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import shell_word, show_path


def test_show_path_is_relative_to_its_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = str(tmp_path / "src" / "model.py")
    assert show_path(inside) == "src/model.py"
    assert show_path(inside, tmp_path / "src") == "model.py"
    assert show_path(str(tmp_path / "tests" / ".." / "train.py")) == "train.py"
    assert show_path(Path(inside), Path("/elsewhere")) == inside
    assert show_path("/elsewhere/model.py") == "/elsewhere/model.py"


def test_show_path_without_working_directory(tmp_path, monkeypatch):
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    assert show_path(str(directory / "model.py")) == str(directory / "model.py")


def test_show_path_escapes_control_characters():
    assert show_path("/a\x1b\n::error::x/é.py") == r"/a\x1b\n::error::x/é.py"


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "tests/é.py",
        "$x `y`",
        "a\x1b'\\\n\u202e",
        "\udc80 half",
        "test_a.py::test_x[##[error]x]",
        "a #b ##",
    ],
)
def test_shell_word_is_printable_and_equivalent(text):
    word = shell_word(text)
    assert printable(word) == word
    assert word.isprintable()
    if printable(text) == text:
        assert word == shlex.quote(text)
    bash = shutil.which("bash")
    assert bash
    meant = subprocess.run([bash, "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert meant.stdout == os.fsencode(text)
