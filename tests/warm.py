"""Fork pytest sessions, and their xdist workers, from a process that has imported torch.

The import takes two thirds of a short session's CPU time, and the acceptance tests run hundreds of
sessions. This project, syrupy and xdist are imported before, too. Otherwise a session starts like
``python -m pytest``. Tests of a session's imports, or of its list of processes, have the mark
``cold``.

`WarmStarter.python` is a substitute for ``python`` in programs that start one: a shell, torchrun,
mpirun, xdist. It accepts ``-m``, ``-c`` or a script, and forwards the signals that end a program.
Its pid differs from that of the forked process.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
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
    """A process that forks sessions; it ends with the process that started it.

    Args:
        modules: What to import besides torch.
    """

    def __init__(self, *modules):
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
        sockets = [theirs.fileno(), listener.fileno()]
        with theirs, listener:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            environment.pop("PYTHONPATH", None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, sockets), *modules],
                pass_fds=sockets,
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments, stdout, stderr, *, directory=None, environment=None):
        """Run pytest, by default in the current directory and environment."""
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
    """The part of ``subprocess.Popen`` that `pytest.Pytester.run` needs."""

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
    """Fork a process for each request; return the request in the new process."""
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
            continue  # the client was killed before its request
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
    """Send a session's exit status to the client; kill the session if the client ends."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(session).encode())
    poll = select.poll()
    poll.register(status, 0)  # reports an error once the client has closed its end
    poll.register(os.pidfd_open(session), select.POLLIN)
    if status in dict(poll.poll()):
        os.kill(session, signal.SIGKILL)
    _, ended = os.waitpid(session, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


def run(request):
    """Run a request in its directory and environment, then end the process."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [request["directory"], *filter(None, added.split(os.pathsep))]
    reopen_output()
    status = 0
    try:
        become_python(request["command"], request["python"])
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            sys.stderr.write(f"{status}\n")
            status = 1
    # End like the interpreter, but do not tear down torch's modules, which would copy their memory.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def reopen_output():
    """Replace the streams, whose buffering and seekability suit the files of the first process."""
    for number, name, buffering in ((1, "stdout", -1), (2, "stderr", 1)):
        old = getattr(sys, name)
        stream = os.fdopen(
            number, "w", buffering, encoding=old.encoding, errors=old.errors, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def import_plugins():
    """Import this project, syrupy and xdist as pytest does, with rewritten assertions.

    Otherwise, that would take two thirds of the CPU time of a session without ranks.
    """
    config = _pytest.config.get_config()
    if not hasattr(config, "inicfg"):
        config.inicfg = {}  # pytest 8 sets it when it reads its arguments
    hook = install_importhook(config)
    hook.mark_rewrite("pytest_fsdp_comm", "syrupy", "xdist")
    package = importlib.import_module("pytest_fsdp_comm")
    modules = pkgutil.walk_packages(package.__path__, "pytest_fsdp_comm.")
    names = [module.name for module in modules if not module.name.endswith("__main__")]
    for name in (*names, "syrupy", "xdist.plugin", "xdist.dsession", "xdist.workermanage"):
        importlib.import_module(name)
    sys.meta_path.remove(hook)


def become_python(command, python):
    """Run ``python *command`` in this process."""
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
    """Let execnet start `program` instead of a new Python."""
    import execnet

    make = execnet.Group.makegateway

    def makegateway(group, spec):
        spec.python = program
        return make(group, spec)

    execnet.Group.makegateway = makegateway


if __name__ == "__main__":
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    with sockets[0] as requests_, sockets[1] as listener_:
        # Import pytest's modules in the order of ``python -m pytest``, and torch's, for sessions.
        import _pytest.config
        import torch.distributed.device_mesh
        import torch.distributed.fsdp
        import torch.distributed.tensor.debug
        import torch.distributed.tensor.parallel
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  # see above
        from _pytest.assertion import install_importhook

        plugins = [f"_pytest.{name}" for name in _pytest.config.default_plugins]
        for name in (*plugins, *sys.argv[3:]):
            importlib.import_module(name)
        import_plugins()
        # Imported modules outlive every session, so exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        # An import has cached the directory; a session may have another one.
        tempfile.tempdir = None
        session_request = serve(requests_, listener_)
    run(session_request)
