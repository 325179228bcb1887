"""Start pytest sessions, and read their output and the machine's processes."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

# The Python of sessions to which a test sends no signal; acceptance/ replaces it (see warm.py).
PYTHON = sys.executable
QUICK_END = ("-p", "no:hypothesispytest")
# With this conftest.py, ranks are new processes, not forks.
UNSAFE_TO_FORK = """
import threading
threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()
"""


def command_lines():
    """Return the command line of each process, with NUL between arguments."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_text())
    return lines


def start(path, *arguments, python=sys.executable):
    environment = {**os.environ, "TMPDIR": str(path), "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "CI"):
        environment.pop(name, None)
    return subprocess.Popen(
        # Hypothesis is imported at the end of a session, which takes seconds on a busy machine.
        [python, "-m", "pytest", "-p", "no:cacheprovider", *QUICK_END, *arguments],
        cwd=path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def wait_for(condition, *, timeout_s=60):
    until = time.monotonic() + extend_under_load(timeout_s)
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def stories(output, title):
    """Return pytest's text below each title of a test that failed, or had an error."""
    title = rf"^_+ (?:ERROR at \w+ of )?{re.escape(title)} _+$"
    return [
        re.split(r"^(?:_{3,} .* _{3,}|={3,} .* ={3,})$", part, flags=re.MULTILINE)[0]
        for part in re.split(title, output, flags=re.MULTILINE)[1:]
    ]
