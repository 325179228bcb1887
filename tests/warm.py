"""Starts pytest sessions from a process that has imported torch already.

The import takes two thirds of a short session's processor time, and the acceptance tests run
hundreds of sessions. Apart from it a session begins as by ``python -m pytest``: no plugin of pytest
and nothing of this project is imported before. A test whose point is what a session imports, or
what a list of processes shows, is marked ``cold``.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

_MOST_NBYTES = 1 << 20


class WarmStarter:
    """A process that forks sessions; ends with the one that made it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_NBYTES)
        with theirs:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            environment.pop("PYTHONPATH", None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments, stdout, stderr, *, directory=None, environment=None):
        """Runs ``pytest``; in this process's directory and environment unless others are given."""
        ours, theirs = os.pipe()
        stdin, unwritten = os.pipe()
        os.close(unwritten)
        request = {
            "arguments": arguments,
            "directory": str(directory or Path.cwd()),
            "environment": environment or {**os.environ},
        }
        try:
            socket.send_fds(
                self._socket, [json.dumps(request).encode()], [stdin, stdout, stderr, theirs]
            )
        finally:
            os.close(theirs)
            os.close(stdin)
        return WarmProcess(ours)

    def close(self):
        self._socket.close()
        self._process.wait()


class WarmProcess:
    """As far as `pytest.Pytester.run` needs it, a ``subprocess.Popen``."""

    stdin = None

    def __init__(self, status):
        self._status = status
        self._pid = int(self._read())
        self.returncode = None

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pytest", timeout)
            self.returncode = int(self._read())
            os.close(self._status)
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)

    def _read(self):
        return os.read(self._status, 32)


def serve(requests):
    """Forks a session a request; returns in each session."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MOST_NBYTES, 4)
        if not data:
            os._exit(0)
        keeper = os.fork()
        if keeper:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *streams, status = descriptors
        session = os.fork()
        if not session:
            os.close(status)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return json.loads(data)
        for stream in streams:
            os.close(stream)
        os.write(status, str(session).encode())
        _, ended = os.waitpid(session, 0)
        os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)


def become_pytest(request):
    """Runs pytest as ``python -m pytest`` does in a directory with an environment."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [request["directory"], *filter(None, added.split(os.pathsep))]

    sys.argv = ["pytest", *request["arguments"]]
    status = 0
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    # As the interpreter ends, but without taking torch's modules apart, which copies all of them.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests_:
        # What sessions import later, and pytest's own modules, as ``python -m pytest`` does first.
        import pytest  # noqa: F401  # see above
        import torch.distributed.device_mesh
        import torch.distributed.fsdp
        import torch.distributed.tensor.debug
        import torch.distributed.tensor.parallel
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  # see above

        # What torch made outlives every session: no collection need look at it.
        gc.collect()
        gc.freeze()
        asked = serve(requests_)
    become_pytest(asked)
