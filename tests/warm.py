"""Starts pytest sessions, and xdist's workers of these, from a process that has imported torch.

The import takes two thirds of a short session's processor time, and the acceptance tests run
hundreds of sessions. Apart from it a session begins as by ``python -m pytest``: no plugin of pytest
and nothing of this project is imported before. A test whose point is what a session imports, or
what a list of processes shows, is marked ``cold``.

`WarmStarter.python` is a program for what starts a Python itself: a shell, torchrun, mpirun, xdist.
It takes ``-m``, ``-c`` or a script, and passes on the signals that end a program; its pid is not
that of the process that runs them.
"""

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_MOST_NBYTES = 1 << 20
_PYTHON = """\
#!/bin/sh
exec {python} -IS {program} {socket} "$@"
"""


class WarmStarter:
    """A process that forks sessions; ends with the one that made it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_NBYTES)
        self._directory = Path(tempfile.mkdtemp(prefix="warm-"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._directory / "socket"))
        listener.listen()
        self.python = str(self._directory / "python")
        Path(self.python).write_text(
            _PYTHON.format(
                python=shlex.quote(sys.executable),
                program=shlex.quote(str(Path(__file__).with_name("warm_python.py"))),
                socket=shlex.quote(str(self._directory / "socket")),
            )
        )
        Path(self.python).chmod(0o700)
        with theirs, listener:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            environment.pop("PYTHONPATH", None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), str(listener.fileno())],
                pass_fds=[theirs.fileno(), listener.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments, stdout, stderr, *, directory=None, environment=None):
        """Runs ``pytest``; in this process's directory and environment unless others are given."""
        ours, theirs = os.pipe()
        stdin, unwritten = os.pipe()
        os.close(unwritten)
        request = {
            "command": ["-m", "pytest", *arguments],
            "python": self.python,
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
        shutil.rmtree(self._directory)


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


def serve(requests, listener):
    """Forks a session or a worker a request; returns in each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if listener in select.select([requests, listener], [], [])[0]:
            worker, _ = listener.accept()
            with worker:
                data, descriptors, _, _ = socket.recv_fds(worker, _MOST_NBYTES, 4)
        else:
            data, descriptors, _, _ = socket.recv_fds(requests, _MOST_NBYTES, 4)
            if not data:
                os._exit(0)
        if not data:
            continue  # killed before it asked
        keeper = os.fork()
        if keeper:
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        requests.close()
        listener.close()
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
        keep(session, status)


def keep(session, status):
    """Tells who asked for a process how it ends, and ends it when that one is gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(session).encode())
    poll = select.poll()
    poll.register(status, 0)  # an error: nobody reads any more
    poll.register(os.pidfd_open(session), select.POLLIN)
    if status in dict(poll.poll()):
        os.kill(session, signal.SIGKILL)
    _, ended = os.waitpid(session, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


def run(request):
    """Runs what was asked for, in its directory with its environment, and ends the process."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [request["directory"], *filter(None, added.split(os.pathsep))]
    status = 0
    try:
        become_python(request["command"], request["python"])
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            sys.stderr.write(f"{status}\n")
            status = 1
    # As the interpreter ends, but without taking torch's modules apart, which copies all of them.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def keep_compiled(*packages):
    """Reads the code of `packages` once for all sessions, which import them anew.

    Reading it takes a short session and its ranks a sixth of their processor time.
    """
    from _pytest.assertion import rewrite

    read = rewrite._read_pyc
    kept = {}
    for package in packages:
        (directory,) = importlib.util.find_spec(package).submodule_search_locations
        for source in Path(directory).rglob("*.py"):
            file = rewrite.get_cache_dir(source) / f"{source.stem}{rewrite.PYC_TAIL}"
            modified = source.stat().st_mtime_ns
            code = read(source, file) or rewrite._rewrite_test(source, None)[1]
            kept[source] = modified, code

    def read_kept(source, *others):
        modified, code = kept.get(source, (None, None))
        is_kept = code is not None and source.stat().st_mtime_ns == modified
        return code if is_kept else read(source, *others)

    rewrite._read_pyc = read_kept


def become_python(command, python):
    """Runs what ``python *command`` does."""
    if command[0] == "-u":
        command = command[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    if command[:2] == ["-m", "pytest"] and {"-n", "-n2"}.intersection(command):
        warm_workers(python)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # as -c
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def warm_workers(program):
    """Has execnet start a program of ours instead of a new Python."""
    import execnet

    make = execnet.Group.makegateway

    def makegateway(group, spec):
        spec.python = program
        return make(group, spec)

    execnet.Group.makegateway = makegateway


if __name__ == "__main__":
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    with sockets[0] as requests_, sockets[1] as listener_:
        # What sessions import later, and pytest's own modules, as ``python -m pytest`` does first.
        import _pytest.config
        import torch.distributed.device_mesh
        import torch.distributed.fsdp
        import torch.distributed.tensor.debug
        import torch.distributed.tensor.parallel
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  # see above

        for name in _pytest.config.default_plugins:
            importlib.import_module(f"_pytest.{name}")
        keep_compiled("pytest_fsdp_comm", "syrupy", "xdist")
        # What was imported outlives every session: no collection need look at it.
        gc.collect()
        gc.freeze()
        # Looked up by the import; a session may have another.
        tempfile.tempdir = None
        asked = serve(requests_, listener_)
    run(asked)
