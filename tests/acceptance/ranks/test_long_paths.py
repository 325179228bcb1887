"""TMPDIR may be as long as a path can be, though the address of a socket holds little of it."""

import os
import sys

import pytest
import running

SOURCE = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

@pytest.mark.parametrize("number", range({tests}))
def test_sum(number, comm_mode, tmp_path, dist_info):
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    assert comm_mode.counts("all_reduce") == 1
    (tmp_path / "mine").write_text(str(dist_info.rank))
    assert len(str(tmp_path)) > {length}
"""
UNSAFE = (
    "import threading\nstop = threading.Event()\n"
    "threading.Thread(target=stop.wait, name='poller', daemon=True).start()\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the path is refused")
@pytest.mark.parametrize(
    ("length", "arguments", "conftest"),
    [(200, (), ""), (1000, ("-n", "2"), ""), (1000, (), UNSAFE)],
    ids=["200-forked", "1000-xdist", "1000-spawned"],
)
def test_ranks_start_below_a_long_tmpdir(pytester, monkeypatch, length, arguments, conftest):
    directory = str(pytester.mkdir("t"))
    while len(directory) < length:
        directory += "/" + "d" * min(99, length - len(directory))
    os.makedirs(directory)  # noqa: PTH103  # as the user has it: a text
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")  # of pytester
    pytester.makeconftest(conftest)
    tests = 1 if conftest else 3
    pytester.makepyfile(SOURCE.format(length=length, tests=tests))
    result = pytester.run(
        running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *arguments, timeout=100
    )
    result.assert_outcomes(passed=tests)
    assert not [name for name in os.listdir(directory) if name.startswith("fsdp-comm")]  # noqa: PTH208  # see above


WITHOUT_DESCRIPTORS = """
import pathlib
import pytest_fsdp_comm.ranks.wire.socket_paths as socket_paths

socket_paths._DESCRIPTORS = pathlib.Path("/proc/nowhere")
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["one", "xdist"])
def test_a_tmpdir_too_long_for_a_socket_is_refused_with_the_limit(pytester, monkeypatch, arguments):
    directory = pytester.mkdir("d" * 100)
    monkeypatch.setenv("TMPDIR", str(directory))
    pytester.makeconftest(WITHOUT_DESCRIPTORS)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distributed(world_size=2)
        def test_it():
            pass

        def test_plain():
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "ranks 0-1 could not be prepared: ranks connect through a socket in the temporary "
            f"directory, whose path is * bytes long ({directory}/fsdp-comm-*/socket); without "
            "/proc/nowhere, this system allows only 107. Set TMPDIR to a directory with a shorter "
            "path, such as /tmp"
        ]
    )
