"""What a warm session starts as the Python of an xdist worker: stands for one that was forked.

Asks the process of `warm.py` for the worker, with its own streams, and ends when and as that does.
"""

import json
import os
import signal
import socket
import sys


def main():
    _, path, *arguments = sys.argv
    status, theirs = os.pipe()
    directory = os.getcwd()  # noqa: PTH109  # pathlib takes longer to import than all the rest
    request = {"python": arguments, "directory": directory, "environment": {**os.environ}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, theirs])
    worker = int(os.read(status, 32))
    # Who waits for the end of a stream waits for the worker's.
    for descriptor in (0, 1, 2, theirs):
        os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
    ended = int(os.read(status, 32))
    if ended < 0:
        os.kill(os.getpid(), -ended)
    sys.exit(ended)


main()
