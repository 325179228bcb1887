"""Threads that Python does not list: those that a fork loses make ranks new processes."""

import subprocess
import sys

import pytest

from pytest_fsdp_comm.ranks.start import spawn
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

THREAD = """
import ctypes
libc = ctypes.CDLL(None)

def start_native(name=None):
    thread = ctypes.c_ulong()
    assert not libc.pthread_create(ctypes.byref(thread), None, libc.usleep, 60_000_000)
    if name:
        assert not libc.pthread_setname_np(thread, name)
"""
INTER_OP = """
import torch

@torch.jit.script
def add(x): return x + 1

@torch.jit.script
def fork(x): return torch.jit.wait(torch.jit.fork(add, x))

fork(torch.ones(2))
"""
GROUP = """
import tempfile
import torch.distributed as dist
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
# What test modules do when they are imported, without any harm to a fork.
USUAL = """
import _thread, threading
import numpy as np
import torch
from torch.utils.data import DataLoader

[*DataLoader(range(8), num_workers=2)]
np.ones((300, 300)) @ np.ones((300, 300))
x = torch.rand(300, 300, requires_grad=True)
(x @ x).exp().sum().backward()
torch.nn.functional.conv2d(torch.rand(4, 8, 64, 64), torch.rand(8, 8, 3, 3))
torch.rand(2000, 2000).exp()
lock = threading.Lock()
lock.acquire()
_thread.start_new_thread(lambda: lock.acquire(), ())  # as execnet does
"""


def reason(tmp_path, code):
    """The reason not to fork in a process that ran some code; it and a fork of it work on."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{code}\nfrom pytest_fsdp_comm.ranks.start.spawn import find_reason_not_to_fork\n"
        "print(find_reason_not_to_fork())\n"
    )
    ran = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=extend_under_load(100),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("start", "text"),
    [
        pytest.param(
            "start_native()",
            "native threads (1) have been running since collection",
            marks=pytest.mark.release,
        ),
        (
            "start_native(); start_native(b'pool-1'); start_native(b'jemalloc_bg_thd')",
            "native threads (2) have been running since collection: 'pool-1'",
        ),
        pytest.param("start_native(b'jemalloc_bg_thd')", "", marks=pytest.mark.release),
        ("start_native(b'cuda00001800007')", ""),
        pytest.param(
            "start_native(b'cuda-pool')",
            "native threads (1) have been running since collection: 'cuda-pool'",
            marks=pytest.mark.release,
        ),
        ("", ""),
    ],
)
def test_native_threads_are_counted_and_named(tmp_path, start, text):
    assert reason(tmp_path, THREAD + start) == text


@pytest.mark.release
@pytest.mark.upstream
def test_inter_op_pool_of_torch_is_find_reason_not_to_fork(tmp_path):
    assert "'PTThreadPool'" in reason(tmp_path, INTER_OP)


@pytest.mark.upstream
@pytest.mark.parametrize(
    "first",
    ["", pytest.param("import torch; torch.set_num_threads(4)", marks=pytest.mark.release)],
)
def test_usual_imports_are_safe_to_fork(tmp_path, first):
    code = f"{first}\n{USUAL}\nimport os\nassert len(os.listdir('/proc/self/task')) > 2"
    assert reason(tmp_path, code) == ""


@pytest.mark.release
@pytest.mark.upstream
def test_a_thread_beside_torchs_pool_is_unsafe(tmp_path):
    code = f"import torch; torch.set_num_threads(4)\n{THREAD}\nstart_native()"
    assert reason(tmp_path, code).startswith("native threads (4)")


@pytest.mark.release
def test_a_process_group_is_find_reason_not_to_fork(tmp_path):
    assert reason(tmp_path, GROUP) == "a process group was created during collection"


def test_native_threads_are_unknown_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(spawn, "_TASKS", tmp_path / "missing")
    assert spawn._count_and_name_native_threads()[0] <= 0


@pytest.mark.parametrize(
    ("start", "text"), [("fork", ""), ("auto", "CUDA"), ("spawn", "the settings")]
)
def test_the_setting_decides_before_what_is_unsafe(monkeypatch, start, text):
    monkeypatch.setattr(spawn, "find_reason_not_to_fork", lambda: "CUDA was initialized")
    assert spawn.find_reason_to_spawn(start).startswith(text)
    assert (spawn.find_reason_to_spawn(start) == "") == (start == "fork")
