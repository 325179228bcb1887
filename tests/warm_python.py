"""The client of `warm.py` (see there), which behaves like the Python that it requests.

It passes its streams to the forked process, waits for its end, and ends in the same way.
"""

import json
import os
import signal
import socket
import sys


def main():
    _, path, *arguments = sys.argv
    status, theirs = os.pipe()
    directory = os.getcwd()  # noqa: PTH109  # pathlib takes longer to import than all else here
    python = os.path.join(os.path.dirname(path), "python")  # noqa: PTH118, PTH120  # see above
    environment = {**os.environ}
    request = {"command": arguments, "python": python}
    request |= {"directory": directory, "environment": environment}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, theirs])
    worker = int(os.read(status, 32))
    # Close the streams, so that they end when the worker closes them.
    for descriptor in (0, 1, 2, theirs):
        os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(worker, number))
    ended = int(os.read(status, 32))
    if ended < 0:
        os.kill(os.getpid(), -ended)
    sys.exit(ended)


main()
