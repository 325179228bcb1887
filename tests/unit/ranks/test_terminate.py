"""A rank that C++ ends saves its position before."""

import signal
import subprocess
import sys

import pytest

from pytest_fsdp_comm.ranks.hangs.terminate import load_position

RANK = """
import ctypes, os, sys
from pathlib import Path
from pytest_fsdp_comm.ranks.hangs.terminate import save_position_at_terminate
from pytest_fsdp_comm.ranks.wire.results import Position

def read_position():
    {body}
    return Position(site="a.py:1 in f")

save_position_at_terminate(Path(sys.argv[1]), read_position)
end = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
{then}
"""


def run(path, *, body="pass", then="end()"):
    code = RANK.format(body=body, then=then)
    process = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert "terminate called" in process.stderr
    return process.returncode, load_position(path)


def test_terminate_saves_the_position_and_aborts(tmp_path):
    status, position = run(tmp_path / "it")
    assert (status, position.site) == (-signal.SIGABRT, "a.py:1 in f")


@pytest.mark.parametrize("body", ["raise ValueError", "raise SystemExit"])
def test_terminate_aborts_without_a_position(tmp_path, body):
    assert run(tmp_path / "it", body=body) == (-signal.SIGABRT, None)


def test_terminate_of_a_forked_child_saves_nothing(tmp_path):
    then = "child = os.fork()\nend() if not child else os.waitpid(child, 0)"
    assert run(tmp_path / "it", then=then) == (0, None)


@pytest.mark.parametrize("text", ["", "{", '{"type": "Position"}', "\udcff"])
def test_incomplete_position_is_ignored(tmp_path, text):
    path = tmp_path / "it"
    path.write_text(text, errors="surrogateescape")
    assert load_position(path) is None
